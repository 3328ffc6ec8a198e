"""Datasets, batches and tokenizers of a run."""
