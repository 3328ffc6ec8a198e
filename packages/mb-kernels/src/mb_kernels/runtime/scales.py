"""What a product of 8-bit floats is multiplied by.

Letters: N rows, M columns of the product, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    """Scales of both operands, and the dtype that the scaled product gets."""

    rows: Tensor
    """[N] fp32."""
    columns: Tensor
    """[E, M] fp32."""
    dtype: torch.dtype


def result(x: Tensor, scales: Scales | None) -> torch.dtype:
    """The dtype of a product of rows ``x``: their own, or that which scaled codes get."""
    return x.dtype if scales is None else scales.dtype


def pointers(scales: Scales | None) -> tuple[Tensor | None, Tensor | None]:
    """The arguments of a kernel: scales of rows and of columns, or None for both."""
    return (None, None) if scales is None else scales[:2]
