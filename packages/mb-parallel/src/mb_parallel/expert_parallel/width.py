"""Experts whose width is split over ranks, for more ranks than experts.

A rank holds an s-th of the width F of one expert: w1 [E, F, D] and w2 [E, D, F] are sharded along E
and F. The outputs [R, D] of the s ranks add up to the expert's output.

For a gated activation w1 is [E, 2F, D], gate over up. It is sharded by contiguous rows, so that a
checkpoint is one [E, 2F, D] matrix for any number of ranks. A rank's rows are then a piece of the
gate or of the up projection. Before use the ranks exchange rows, so that each has gate and up
projection of the same s-th of F. Each sends at most its own rows, once forward and once backward.

Letters: E experts, D hidden, F expert ffn width, s ranks per expert.
"""

from __future__ import annotations

import torch.nn.functional as F
from mb_layers.experts import Experts
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, exchange_rows
from mb_parallel.tensor_parallel.adapt import to_local


class WidthShardedExperts(Experts):
    """`Experts` of which this rank has an s-th of one. Made by `parallelize_experts`."""

    width: Place

    def local_parameters(self, num_experts: int) -> list[Tensor | None]:
        """w1, w2, b1 and b2 as this rank computes with them."""
        names = ("w1", "w2", "b1", "b2")
        held = (self.working_copies.get(name, getattr(self, name)) for name in names)
        w1, w2, b1, b2 = (None if w is None else to_local(w) for w in held)
        assert w1 is not None
        if self.config.is_glu:
            w1 = _gate_over_up(w1[0], self.width)[None]
            b1 = None if b1 is None else _gate_over_up(b1[0], self.width)[None]
        if b2 is not None:
            # Each rank adds its own s-th of the bias, so that the sum has it once.
            before = self.width.rank * b2.shape[1]
            b2 = F.pad(b2, (before, self.config.hidden_size - before - b2.shape[1]))
        return [w1, w2, b1, b2]


def _gate_over_up(rows: Tensor, place: Place) -> Tensor:
    """From a contiguous s-th of gate over up, [2F / s, ...], to the s-th of each, gate first."""
    size, rank = place.size, place.rank
    part = rows.shape[0] // 2  # F / s rows: gate and up are s parts each, and a rank stores two

    def wanted_by(holder: int) -> list[int]:
        return [q % size for q in (2 * holder, 2 * holder + 1)]

    mine = wanted_by(rank)
    if mine[0] > mine[1]:  # rows leave in the order of the ranks that want them
        rows = rows.roll(part, 0)
    to = [part * mine.count(other) for other in range(size)]
    from_ = [part * wanted_by(other).count(rank) for other in range(size)]
    # They arrive in the order of ranks, and a lower rank holds a part of gate than the same of up.
    return exchange_rows(rows, to, from_, place)
