"""Expert parallelism by stores into the other ranks' memory, without the host and without NCCL.

Kernels of `mb_kernels.exchange` gather a token and store it in the receiver's memory, once for each
rank, even if several of its experts are there. The results come back in the same way, and are
summed in fp32 in a fixed order. The host reads nothing between logits and output, shapes are
static, and a CUDA graph can hold the layer. The buffers have room for every token of every rank, so
nothing overflows.

All layers share the buffers, so what a rank received has been overwritten when the backward pass
comes. Either the tokens are sent again, beside the gradients, or the experts keep them
(`keep_rows`). The first doubles the traffic of tokens, the second takes P T rows of memory a layer.
If a token has only one choice on a rank, the experts keep its row in any case.

Letters: T tokens, D hidden, K top-k, P ranks, R rows that the buffers hold, J choices of a token on
one rank, W words of routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import mb_kernels
import torch
from mb_kernels import Bins
from mb_kernels.derivatives import once_differentiable
from mb_kernels.exchange import PeerMemory, unpack_routing_backward
from mb_kernels.uncompiled import uncompiled
from mb_layers.dispatch import Dispatched, innermost
from mb_layers.tensors import cast_alike
from torch import Tensor, nn

from mb_parallel.expert_parallel.collectives import Place
from mb_parallel.expert_parallel.peer_memory import PeerBuffers, Step
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.rows import Rows


@dataclass
class _Route:
    """What a dispatch of this rank sent where; used until the end of its backward pass."""

    buffers: PeerBuffers
    memory: PeerMemory
    layer: int
    placement: Placement
    peers_TC: Tensor
    bins: Bins
    keep_rows: bool
    home_P: Tensor | None  # where the experts store their result; None: `collect` sends it
    counts_P: Tensor | None = None  # rows that came from each rank
    ids_RJ: Tensor | None = None  # local ids of the choices that came
    filled: dict[str, int] = field(default_factory=dict)  # the buffers' `uses` when they were

    def send(
        self,
        x_TD: Tensor,
        payload_TW: Tensor | None,
        buffer: Literal["tokens", "grads"],
        step: Step,
    ) -> Tensor:
        """Send rows, and with them payload; returns how many came from each rank, counts_P."""
        if (self.memory, buffer) in self.buffers.unread:
            # No gradient was sent home, because neither tokens nor weights needed one.
            self._go_home(None, None, self.bins.tokens_per_expert_E, step)
        self.memory.push(
            buffer,
            x_TD,
            self.bins.tokens_per_expert_E,
            order_N=self.bins.order_N,
            columns=self.peers_TC.shape[1],
            payload=None if payload_TW is None else _as_payload(payload_TW),
        )
        self.buffers.uses[buffer] += 1
        self.filled[buffer] = self.buffers.uses[buffer]
        return self.memory.wait(buffer, self.buffers.place_of(self.layer, step))

    def collect(self, rows_RD: Tensor, payload_RW: Tensor | None, step: Step) -> list[Tensor]:
        """Send payload and, unless the experts have, rows home; returns each token's sums."""
        if any(self.buffers.uses[buffer] != use for buffer, use in self.filled.items()):
            raise RuntimeError(
                f"Expected nothing to be dispatched between dispatch and combine of "
                f"{self.buffers.name_of(self.layer)}, or within its backward, got another layer's "
                "exchange, whose rows are in the buffers now. Run the layers one after the other, "
                "or use another dispatcher."
            )
        assert self.counts_P is not None
        memory = self.memory
        stored = self.home_P is not None
        words_RW = None if payload_RW is None else _as_payload(payload_RW)
        self._go_home(None if stored else rows_RD, words_RW, self.counts_P, step)
        indices = (self.peers_TC, self.bins.inverse_N, self.bins.offsets_E1)
        sources = [memory.rows("home")]
        if payload_RW is not None and words_RW is not None:
            came_RW = memory.payload("home", words_RW.shape[1])
            sources.append(came_RW.view(payload_RW.dtype))
        return [memory.sum_home(source, *indices) for source in sources]

    def _go_home(
        self, rows_RD: Tensor | None, words_RW: Tensor | None, counts_P: Tensor, step: Step
    ) -> None:
        """Send what there is home, and wait for the peers', by which they have read all before."""
        self.memory.push("home", rows_RD, counts_P, payload=words_RW)
        self.memory.wait("home", self.buffers.place_of(self.layer, step))
        # A checkpoint combines again while a backward pass has gradients that are still to be read.
        if step != "combine":
            self.buffers.unread.clear()


class PeerDispatcher:
    """Sends each token once to each rank that it has an expert on, by kernels.

    Args:
        num_experts: E of the layer.
        place: the expert-parallel group.
        buffers: shared with the other layers.
        keep_rows: whether the experts keep the received tokens for the backward pass. False: they
            are sent again.
        rows: how much memory the experts allocate; None: for the worst case.
        stores_home: returns whether the experts can store their result in the peers' memory
            themselves, as `Experts.stores_home`. It is then sent while they compute.
    """

    def __init__(
        self,
        num_experts: int,
        place: Place,
        buffers: PeerBuffers,
        *,
        keep_rows: bool = False,
        rows: Rows | None = None,
        stores_home: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_experts = num_experts
        self.place = place
        self.buffers = buffers
        self.keep_rows = keep_rows
        self.rows = rows or Rows()
        self.stores_home = stores_home
        self.placement = Placement(num_experts, place.size, place.rank)
        self.layer = buffers.register(place.layer)

    # One break in a compiled layer, not one for each part: between these kernels is nothing to
    # compile, and the host starts each piece of a graph by itself.
    @uncompiled
    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Store tokens and routing into the peers' memory; x_RD has room for all of them."""
        top_k = expert_ids_TK.shape[1]
        (x_TD,) = cast_alike(x_TD)
        words_TW, peers_TC, counts_E, slots = self.placement.pack(
            weights_TK.detach(), expert_ids_TK
        )
        bins = mb_kernels.bin_tokens(peers_TC, self.place.size)
        memory = self.buffers.memory(x_TD, _as_payload(words_TW).shape[1])
        route = _Route(
            buffers=self.buffers,
            memory=memory,
            layer=self.layer,
            placement=self.placement,
            peers_TC=peers_TC,
            bins=bins,
            keep_rows=self.keep_rows,
            home_P=self._home(memory),
        )
        x_RD, weights_RJ = _Send.apply(x_TD, weights_TK, words_TW, route)
        assert route.ids_RJ is not None
        local_bins = mb_kernels.bin_tokens(route.ids_RJ, self.placement.experts_per_rank)
        return Dispatched(
            x_RD=x_RD,
            weights_RK=weights_RJ,
            bins=local_bins,
            tokens_per_expert_E=counts_E,
            kept_slots=slots,
            state=(route, x_TD.detach()),
            max_rows=self.rows.most(local_bins, self.placement, memory.layout.rows, top_k),
            x_stays=not self.keep_rows,
            home_P=route.home_P,
        )

    def _home(self, memory: PeerMemory) -> Tensor | None:
        # Rows beyond a budget are not stored at all. A result that is stored elsewhere reads as NaN
        # here, which autograd's search for NaN would report. There are no kernels for float64.
        all_stored = self.rows.policy != "budget" and memory.layout.dtype is not torch.float64
        searched = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        return memory.home_P if all_stored and not searched and self.stores_home() else None

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Store the experts' rows in the memory of the ranks that their tokens are from; sum there.

        Raises:
            ValueError: rows that were changed after the experts had stored them.
        """
        route, x_TD = dispatched.state
        return _collect(y_RD, x_TD, route)


@uncompiled
def _collect(y_RD: Tensor, x_TD: Tensor, route: _Route) -> Tensor:
    if route.home_P is not None and any(y_RD.stride()):  # expert_mlp returns one NaN, expanded
        raise ValueError(
            f"Expected the result of the experts of {route.buffers.name_of(route.layer)} as they "
            "return it, for it is in the memory of other ranks already; got another one. Change "
            "it in a forward hook of the experts, which then send it later, or set stores_home "
            "of the layer's dispatcher to `lambda: False`."
        )
    return _Collect.apply(y_RD, x_TD, route)


def _as_payload(numbers: Tensor) -> Tensor:
    """The same bits in words of 32, as a payload has: of an fp64 two."""
    return numbers.contiguous().view(torch.float32)


def reached_by_peers(module: nn.Module) -> bool:
    """Whether a layer's dispatcher is a `PeerDispatcher`, whatever is around it."""
    return isinstance(innermost(getattr(module, "dispatcher", None)), PeerDispatcher)


class _Send(torch.autograd.Function):
    """Tokens and routing to the ranks of their experts: x [R, D] and weights [R, J]."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, words_TW: Tensor, route: _Route
    ) -> tuple[Tensor, Tensor]:
        ctx.route, memory = route, route.memory
        ctx.weights_dtype = weights_TK.dtype
        route.counts_P = route.send(x_TD, words_TW, "tokens", "dispatch")
        came_RW = memory.payload("tokens").view(words_TW.dtype)
        unpacked = route.placement.unpack(came_RW, route.counts_P)
        weights_RJ, route.ids_RJ, columns_RK = unpacked
        ctx.save_for_backward(columns_RK)
        return memory.rows("tokens"), weights_RJ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RD: Tensor, d_weights_RJ: Tensor) -> tuple[Any, ...]:
        d_words_RK = unpack_routing_backward(d_weights_RJ, *ctx.saved_tensors)
        dx_TD, d_weights_TK = ctx.route.collect(dx_RD, d_words_RK, "the backward of dispatch")
        return dx_TD, d_weights_TK.to(ctx.weights_dtype), None, None


class _Collect(torch.autograd.Function):
    """Rows back to where their tokens belong, summed there.

    Its backward fills "grads", and "tokens" again, for the experts' backward that comes next.
    """

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, x_TD: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(*(() if route.keep_rows else (x_TD,)))
        return route.collect(y_RD, None, "combine")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None]:
        route: _Route = ctx.route
        route.buffers.check(route.memory)
        # The tokens of the forward pass have served. A checkpoint dispatches them again in between,
        # when the first saved tensor is asked for: below, or else in the experts' backward.
        route.filled.clear()
        route.send(dy_TD, None, "grads", "the backward of combine")
        if not route.keep_rows:
            (x_TD,) = ctx.saved_tensors
            route.send(x_TD, None, "tokens", "the backward of combine")
        route.buffers.unread.update((route.memory, buffer) for buffer in route.filled)
        return route.memory.rows("grads"), None, None
