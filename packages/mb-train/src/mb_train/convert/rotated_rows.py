"""The rotated rows of latent attention, which others pair otherwise than we do.

In DeepSeek's files and Megatron Core's a rotation turns two neighbours, in ours a row of the first
half with one of the second.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_halves(rows: Tensor, groups: int, rotated: int) -> Tensor:
    """Rows [groups][others, rotated] of neighbours (0, 1), (2, 3), ..., as 0, 2, ..., 1, 3, ..."""
    return _rearranged(rows, groups, rotated, (-1, 2))


def as_neighbours(rows: Tensor, groups: int, rotated: int) -> Tensor:
    """The inverse of `in_halves`."""
    return _rearranged(rows, groups, rotated, (2, -1))


def _rearranged(rows: Tensor, groups: int, rotated: int, sizes: tuple[int, int]) -> Tensor:
    by_group = rows.unflatten(0, (groups, -1))
    turned = by_group[:, -rotated:].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return torch.cat([by_group[:, :-rotated], turned], dim=1).flatten(0, 1)
