"""Rows of several maps as those of one, in which the maps take turns, group by group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def by_group(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Parts that each have as many rows for every group: as [groups][all parts' rows]."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def from_groups(rows: Tensor, groups: int, counts: Sequence[int]) -> list[Tensor]:
    """The inverse of `by_group`, of parts with `counts` rows for a group."""
    parts = rows.unflatten(0, (groups, -1)).split(list(counts), dim=1)
    return [part.flatten(0, 1) for part in parts]
