"""What the stages measured, brought to every rank in one exchange per step.

Letters: M micro-batches, L MoE layers of all stages, l of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mb_parallel.pipeline_parallel.stage import Pass
from mb_parallel.world import of_all_ranks


class Entry(NamedTuple):
    """A value that a stage has for each micro-batch: a loss, or a metric [l, ...]."""

    stage: int
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Reports:
    """Learns from the first step what each stage reports, and gathers it in every step.

    Every rank fills in its own stages' places and zeros elsewhere; the sum is everyone's. fp64
    holds fp32 values and counts exactly.
    """

    def __init__(self, passing: Pass, group: ProcessGroup) -> None:
        self._mine = _entries(passing, 0)
        everyone = of_all_ranks(self._mine, group)
        self._group = group
        self._entries = sorted(entry for entries in everyone for entry in entries)

    def gather(self, passing: Pass) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """The losses, summed over micro-batches; the metrics of each, rows in order of layers.

        Raises:
            ValueError: a stage reports something else than in the first micro-batch of all.
        """
        for number in range(len(passing.batches)):
            self._check(number, _entries(passing, number))
        mine = {
            (stage, kind, name): value
            for (stage, kind), of_batches in passing.reported.items()
            for name, value in _stacked(of_batches).items()
        }
        batches = len(passing.batches)
        device = passing.batches[0][passing.first_input].device
        zeros = torch.zeros((), dtype=torch.float64, device=device)
        parts = [
            mine[entry[:3]].flatten().double()
            if entry[:3] in mine
            else zeros.expand(batches * math.prod(entry.shape))
            for entry in self._entries
        ]
        packed = torch.cat(parts)
        dist.all_reduce(packed, group=self._group)
        losses: dict[str, Tensor] = {}
        rows: dict[str, list[Tensor]] = {}
        for entry, values in zip(
            self._entries, packed.split([p.numel() for p in parts]), strict=True
        ):
            value = values.view(batches, *entry.shape)
            if entry.kind == "loss":
                losses[entry.name] = value.sum(0).to(entry.dtype)
            else:
                rows.setdefault(entry.name, []).append(value.to(entry.dtype))
        by_layer = {name: torch.cat(stages, dim=1) for name, stages in rows.items()}
        return losses, [
            {name: value[index] for name, value in by_layer.items()} for index in range(batches)
        ]

    def _check(self, number: int, entries: list[Entry]) -> None:
        """Other ranks count on the places of the first step, so nothing may come or go later."""
        if entries == self._mine:
            return
        got, expected = (
            ", ".join(f"{e.kind} {e.name!r} {list(e.shape)} in {e.dtype}" for e in sorted(these))
            for these in (set(entries) - set(self._mine), set(self._mine) - set(entries))
        )
        raise ValueError(
            "Expected every micro-batch to have the losses and metrics of the first, in the same "
            f"shapes and dtypes, got {got or 'nothing'} instead of {expected or 'nothing'} in "
            f"micro-batch {number}. Return zeros where a stage has nothing to report."
        )


def _entries(passing: Pass, number: int) -> list[Entry]:
    """What this rank's stages report of a micro-batch."""
    return sorted(
        Entry(stage, kind, name, tuple(value.shape), value.dtype)
        for (stage, kind), of_batches in passing.reported.items()
        for name, value in of_batches[number].items()
    )


def _stacked(of_batches: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = of_batches[0]
    return {name: torch.stack([values[name].detach() for values in of_batches]) for name in names}
