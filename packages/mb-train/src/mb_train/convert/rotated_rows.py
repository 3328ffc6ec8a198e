"""Rotated rows of queries and keys, which others pair otherwise than we do.

In DeepSeek's, ERNIE's and GLM-4's files and Megatron Core's latent attention a rotation turns two
neighbours, in ours a row of the first half with one of the second.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_halves(rows: Tensor, groups: int, rotated: int, *, first: bool = False) -> Tensor:
    """Rotated rows of neighbours (0, 1), (2, 3), ..., as 0, 2, ..., 1, 3, ...

    Args:
        rows: [groups][others, rotated], with `first` [groups][rotated, others].
        rotated: how many are.
    """
    return _rearranged(rows, groups, rotated, (-1, 2), first)


def as_neighbours(rows: Tensor, groups: int, rotated: int, *, first: bool = False) -> Tensor:
    """The inverse of `in_halves`."""
    return _rearranged(rows, groups, rotated, (2, -1), first)


def _rearranged(
    rows: Tensor, groups: int, rotated: int, sizes: tuple[int, int], first: bool
) -> Tensor:
    by_group = rows.unflatten(0, (groups, -1))
    others = by_group.shape[1] - rotated
    parts = list(by_group.split([rotated, others] if first else [others, rotated], dim=1))
    place = 0 if first else 1
    parts[place] = parts[place].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return torch.cat(parts, dim=1).flatten(0, 1)
