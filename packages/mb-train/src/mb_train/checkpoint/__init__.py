"""Checkpoints: read without trust, written whole or not at all."""
