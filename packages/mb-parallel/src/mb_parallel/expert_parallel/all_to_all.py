"""Expert parallelism by exchange: each rank gets the tokens its experts were chosen for, no others.

A token goes to a rank once, with its choices there and their weights, however many of them there
are; the rank's experts sum their outputs, and that one row comes home. Ranks are to this exchange
what experts are to a layer, so the rows to send are sorted, gathered and summed by the same ops.
Exact for any routing, on any backend. The numbers of rows are exchanged first, and the host reads
them to know its splits: the layer's one wait for the device.

Letters: T tokens, D hidden, K top-k, P ranks, C destinations of a token, S = T C rows to send at
most, R received rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mb_kernels
import torch
from mb_kernels import Bins
from mb_layers.dispatch import Dispatched
from mb_layers.experts import cast_alike
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, counts_of_ranks, exchange_rows
from mb_parallel.expert_parallel.placement import Placement, pack_routing, unpack_routing


class _Sent(NamedTuple):
    """What went where: rows by rank in `bins`, C of them per token, and the splits."""

    bins: Bins
    columns: int
    to: list[int]
    from_: list[int]


class AllToAllDispatcher:
    """Sends each token once to each rank that it has an expert on.

    Args:
        num_experts: E of the layer.
        place: the expert-parallel group.
    """

    def __init__(self, num_experts: int, place: Place) -> None:
        self.num_experts = num_experts
        self.place = place
        self.placement = Placement(num_experts, place.size, place.rank)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Exchange counts, then tokens and routing; bins hold the slots of this rank's experts."""
        top_k = expert_ids_TK.shape[1]
        (x_TD,) = cast_alike(x_TD)  # autocast's dtype travels, not fp32
        counts_E = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts).tokens_per_expert_E
        bins = mb_kernels.bin_tokens(self.placement.destinations(expert_ids_TK), self.place.size)
        # Rows for each rank, and the slots in them: what the experts there have to make room for.
        slots_P = counts_E.view(-1, self.placement.experts_per_rank).sum(1, dtype=torch.int32)
        slots_P = slots_P.repeat_interleave(self.placement.width_shards)
        counts_2P = torch.stack((bins.tokens_per_expert_E, slots_P))
        by_rank, slots = zip(*counts_of_ranks(counts_2P, self.place), strict=True)
        max_rows = max(sum(theirs[self.place.rank] for theirs in slots), 1)
        sent = _Sent(
            bins,
            self.placement.most_destinations(top_k),
            to=by_rank[self.place.rank],
            from_=[theirs[self.place.rank] for theirs in by_rank],
        )
        x_SD = mb_kernels.gather(x_TD, bins, sent.columns)
        routing_SK = mb_kernels.gather(pack_routing(weights_TK, expert_ids_TK), bins, sent.columns)
        x_RD = exchange_rows(x_SD, sent.to, sent.from_, self.place)
        routing_RK = exchange_rows(routing_SK, sent.to, sent.from_, self.place)
        weights_RJ, ids_RJ = unpack_routing(routing_RK, self.placement, top_k)
        local_bins = mb_kernels.bin_tokens(ids_RJ, self.placement.experts_per_rank)
        kept = counts_E.sum(dtype=torch.int32)
        return Dispatched(x_RD, weights_RJ, local_bins, counts_E, kept, sent, max_rows)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the rows back, and sum each token's in the order of ranks."""
        sent: _Sent = dispatched.state
        slots = sent.bins.order_N.shape[0]
        y_SD = exchange_rows(y_RD, sent.from_, sent.to, self.place, total=slots)
        return _Sum.apply(y_SD, sent.bins, sent.columns)


class _Sum(torch.autograd.Function):
    """The unweighted sum of each token's rows: the backward of `mb_kernels.gather`, and it its."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, bins: Bins, columns: int) -> Tensor:
        ctx.bins, ctx.columns = bins, columns
        ones_TC = torch.ones(
            (rows_SD.shape[0] // columns, columns),
            device=rows_SD.device,
            dtype=torch.float64 if rows_SD.dtype is torch.float64 else torch.float32,
        )
        return mb_kernels.combine(rows_SD, bins, ones_TC)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # ty: ignore[incompatible-method-override]
        return mb_kernels.gather(grad_TD.contiguous(), ctx.bins, ctx.columns), None, None
