"""The dtype that sums have, whatever that of the numbers: fp32, and fp64 for fp64."""

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp64 for ``x`` in fp64, else fp32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """``x`` in its ``wide_dtype``."""
    return x.to(wide_dtype(x))
