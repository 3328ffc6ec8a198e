"""The dtype that weights are made in."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def fp32_by_default() -> Generator[None]:
    """Within it new tensors are fp32, whatever the caller has set: torch makes weights in its
    default dtype, and bf16 there would take the place of fp32 masters without a word."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
