"""Widths that are no multiples of 16, at the border of an op.

Matrix units and loads of 16 bytes take multiples of 16 alone. Zeros add nothing to a product: the
border widens operands with them, which costs a copy, and cuts the result.
"""

import torch.nn.functional as functions
from torch import Tensor

from mb_kernels.runtime.registration import use_triton


def lacking(x: Tensor, size: int) -> int:
    """How many more rows or columns than ``size`` the kernels want; none where they do not run."""
    more = -size % 16
    return more if more and use_triton(x) else 0


def widened(x: Tensor, *more: int) -> Tensor:
    """``x`` with so many zeros more in the last dimension, the last but one; itself for none."""
    return functions.pad(x, [n for one in more for n in (0, one)]) if any(more) else x


def cut(y: Tensor, *sizes: int) -> Tensor:
    """The first so many of the last dimension, the last but one; itself where there are no more."""
    whole = y
    for dim, size in enumerate(sizes, start=1):
        if y.shape[-dim] != size:
            y = y.narrow(-dim, 0, size)
    return y if y is whole else y.contiguous()
