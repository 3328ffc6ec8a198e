"""Megatron's indexed datasets, tokenization and sampling, without torch."""

__version__ = "0.1.0"
