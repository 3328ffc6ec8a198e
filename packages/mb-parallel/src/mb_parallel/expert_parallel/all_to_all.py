"""Expert parallelism by exchange: each rank gets the tokens its experts were chosen for, no others.

A token goes to a rank once, with its choices there and their weights, however many of them there
are; the rank's experts sum their outputs, and that one row comes home. Ranks are to this exchange
what experts are to a layer, so the rows to send are sorted, gathered and summed by the same ops.
Exact for any routing, on any backend. The numbers of rows are exchanged first, and the host reads
them to know its splits: the layer's one wait for the device. In chunks of tokens the exchange hides
behind the products of the experts, see `overlap`.

Letters: T tokens, D hidden, K top-k, P ranks, C destinations of a token, S = T C rows to send at
most, R received rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mb_kernels
import torch
from mb_kernels import Bins
from mb_kernels.exchange import PackedRouting
from mb_kernels.uncompiled import uncompiled
from mb_layers.dispatch import Dispatched
from mb_layers.tensors import cast_alike
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, counts_of_ranks
from mb_parallel.expert_parallel.overlap import Chunk, Chunks, Exchange
from mb_parallel.expert_parallel.placement import Placement


class _Sent(NamedTuple):
    """What of a chunk goes where: rows by rank in `bins`, `columns` of them per token."""

    bins: Bins
    columns: int
    slots_P: Tensor  # slots for each rank's experts: what they have to make room for


class AllToAllDispatcher:
    """Sends each token once to each rank that it has an expert on.

    Args:
        num_experts: E of the layer.
        place: the expert-parallel group.
        chunks: cut the tokens into so many, so that the exchange of one and the experts' products
            of another overlap; for experts that `overlap.compute_in_chunks` was told.
    """

    def __init__(self, num_experts: int, place: Place, *, chunks: int = 1) -> None:
        if chunks < 1:
            raise ValueError(f"Expected chunks of at least 1, got {chunks}.")
        self.num_experts = num_experts
        self.place = place
        self.chunks = chunks
        self.placement = Placement(num_experts, place.size, place.rank)

    # Numbers of rows are new to the host each time: compiled, it would be compiled again and again.

    @uncompiled
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Exchange counts, then tokens and routing; bins hold the slots of this rank's experts."""
        (x_TD,) = cast_alike(x_TD)  # autocast's dtype travels, not fp32
        routing = zip(
            weights_TK.tensor_split(self.chunks),
            expert_ids_TK.tensor_split(self.chunks),
            strict=True,
        )
        packed = [self.placement.pack(*chunk) for chunk in routing]
        sent = [self._sort(one) for one in packed]
        counts_C2P = torch.stack(
            [torch.stack((one.bins.tokens_per_expert_E, one.slots_P)) for one in sent]
        )
        by_rank = counts_of_ranks(counts_C2P, self.place)
        under_way = [
            self._send(x, one.words_TW, where, [theirs[c] for theirs in by_rank])
            for c, (x, one, where) in enumerate(
                zip(x_TD.tensor_split(self.chunks), packed, sent, strict=True)
            )
        ]
        counts_E, slots = packed[0].tokens_per_expert_E, packed[0].slots
        for one in packed[1:]:
            counts_E, slots = counts_E + one.tokens_per_expert_E, slots + one.slots
        return (
            under_way[0]
            .arrive()
            ._replace(tokens_per_expert_E=counts_E, kept_slots=slots, state=Chunks(under_way, sent))
        )

    @uncompiled
    def combine(self, y_RD: Tensor | list[Tensor], dispatched: Dispatched) -> Tensor:
        """Send the rows back, and sum each token's in the order of ranks."""
        state: Chunks = dispatched.state
        rows = y_RD
        if isinstance(rows, Tensor):
            assert len(state.chunks) == 1, "experts that compute in chunks"
            rows = [state.chunks[0].home.begin(rows)]
        sums = [
            _Sum.apply(chunk.home.end(y_SD), sent.bins, sent.columns)
            for y_SD, chunk, sent in zip(rows, state.chunks, state.state, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _sort(self, packed: PackedRouting) -> _Sent:
        bins = mb_kernels.bin_tokens(packed.peers_TC, self.place.size)
        by_group = packed.tokens_per_expert_E.view(-1, self.placement.experts_per_rank)
        slots_P = by_group.sum(1, dtype=torch.int32)
        slots_P = slots_P.repeat_interleave(self.placement.width_shards)
        return _Sent(bins, packed.peers_TC.shape[1], slots_P)

    def _send(self, x_TD: Tensor, words_TW: Tensor, sent: _Sent, by_rank: list[Any]) -> Chunk:
        """Let a chunk set out; `by_rank` has the rows and the slots that each rank sends to all."""
        me = self.place.rank
        to, from_ = by_rank[me][0], [rows[me] for rows, _ in by_rank]
        max_rows = max(sum(slots[me] for _, slots in by_rank), 1)
        tokens, routing = (Exchange(to, from_, self.place) for _ in range(2))
        x_RD = tokens.begin(mb_kernels.gather(x_TD, sent.bins, sent.columns))
        words_RW = routing.begin(mb_kernels.gather(words_TW, sent.bins, sent.columns))

        def arrive() -> Dispatched:
            rows_RD = tokens.end(x_RD)
            weights_RJ, ids_RJ, _ = self.placement.unpack(routing.end(words_RW))
            bins = mb_kernels.bin_tokens(ids_RJ, self.placement.experts_per_rank)
            none = bins.offsets_E1[0]
            return Dispatched(
                rows_RD, weights_RJ, bins, bins.tokens_per_expert_E, none, None, max_rows
            )

        home = Exchange(from_, to, self.place, total=sent.bins.order_N.shape[0])
        return Chunk(arrive, home)


class _Sum(torch.autograd.Function):
    """The unweighted sum of each token's rows: the backward of `mb_kernels.gather`, and it its."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, bins: Bins, columns: int) -> Tensor:
        ctx.bins, ctx.columns = bins, columns
        shape = (rows_SD.shape[0] // columns, columns)
        ones_TC = torch.ones(shape, dtype=torch.float32, device=rows_SD.device)
        return mb_kernels.combine(rows_SD, bins, ones_TC)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # ty: ignore[incompatible-method-override]
        return mb_kernels.gather(grad_TD.contiguous(), ctx.bins, ctx.columns), None, None
