"""Widths that are not multiples of 16.

The matrix kernels take multiples of 16 only. Before the op operands are widened with zeros, which
add nothing to a product; this costs a copy. After it the result is cut.
"""

import torch.nn.functional as functions
from torch import Tensor

from mb_kernels.runtime.registration import use_triton


def lacking(x: Tensor, size: int) -> int:
    """Rows or columns missing to a multiple of 16; 0 where no kernel runs."""
    more = -size % 16
    return more if more and use_triton(x) else 0


def widened(x: Tensor, *more: int) -> Tensor:
    """``x`` with ``more`` zeros added to its last dimension, the one before; itself if none."""
    return functions.pad(x, [n for one in more for n in (0, one)]) if any(more) else x


def cut(y: Tensor, *sizes: int) -> Tensor:
    """``y`` cut to these sizes of its last dimension, the one before; itself if it has them."""
    whole = y
    for dim, size in enumerate(sizes, start=1):
        if y.shape[-dim] != size:
            y = y.narrow(-dim, 0, size)
    return y if y is whole else y.contiguous()
