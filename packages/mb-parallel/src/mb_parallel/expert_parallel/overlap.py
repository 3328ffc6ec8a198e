"""Exchange and computation at the same time: exchanges in two halves, and experts run in chunks.

A rank's tokens are cut into chunks. All chunks are sent at once. While the experts compute on one
chunk, the next one arrives, and the results of the previous one are sent home:

    exchange   chunk 0 | chunk 1 | home 0  | home 1       The backward pass is the mirror image:
    experts            | chunk 0 | chunk 1 |              there, `end` begins and `begin` ends.

Collectives run on a stream of their own on a GPU, in threads on a CPU. Each chunk reads the
experts' weights once more, and adds its gradients of the weights to those of the others.

Letters: S rows to send, R received rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mb_kernels.derivatives import once_differentiable
from mb_kernels.uncompiled import uncompiled
from mb_layers.dispatch import Dispatched, innermost
from mb_layers.experts import Experts
from torch import Tensor, nn

from mb_parallel.expert_parallel.collectives import Place
from mb_parallel.forwards import wrap_forward


class Exchange:
    """One exchange of rows, and the exchange back in the backward pass, each in two halves.

    `begin` starts sending and `end` waits. What `begin` returns may only be given to `end`.

    Args:
        to: number of rows for each rank; x holds them in this order. Further rows are not sent, and
            their gradient is zero.
        from_: number of rows from each rank.
        total: number of rows of the result, at least `sum(from_)`. The last ones are not written.
    """

    def __init__(
        self, to: Sequence[int], from_: Sequence[int], place: Place, *, total: int | None = None
    ) -> None:
        self.to, self.from_, self.place = list(to), list(from_), place
        self.total = sum(from_) if total is None else total
        self.rows = 0  # of what `begin` was given
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    @uncompiled
    def begin(self, x_SD: Tensor) -> Tensor:
        """Start to send the rows of x; returns the result [total, D], still to be written."""
        return _Begin.apply(x_SD, self)

    @uncompiled
    def end(self, x_RD: Tensor) -> Tensor:
        """Wait for what `begin` returned."""
        return _End.apply(x_RD, self)

    def send(self, x: Tensor, to: list[int], from_: list[int], total: int) -> Tensor:
        out, sent = x.new_empty((total, *x.shape[1:])), x.contiguous()[: sum(to)]
        with self.place.step("exchange rows"):
            work = dist.all_to_all_single(
                out[: sum(from_)], sent, from_, to, group=self.place.group, async_op=True
            )
        self._under_way = work, out, sent  # which is read until then
        return out

    def wait(self) -> Tensor:
        """Wait for the exchange that was started last, and return its result."""
        assert self._under_way is not None
        work, out, _ = self._under_way
        with self.place.step("exchange rows"):
            work.wait()
        self._under_way = None
        return out


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, exchange.rows = exchange, x_SD.shape[0]
        return exchange.send(x_SD, exchange.to, exchange.from_, exchange.total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad_SD = ctx.exchange.wait()  # `grad` only ensures that `_End.backward` has run
        grad_SD[sum(ctx.exchange.to) :].zero_()
        return grad_SD, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return x_RD.view_as(x_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        exchange: Exchange = ctx.exchange
        exchange.send(grad_RD, exchange.from_, exchange.to, exchange.rows)
        return grad_RD, None


@dataclass(frozen=True)
class Chunk:
    """One chunk of a dispatch: on its way to the experts here, or on its way home.

    arrive: waits for the chunk, and returns what the experts compute on.
    home: the exchange that brings their results back.
    """

    arrive: Callable[[], Dispatched]
    home: Exchange


@dataclass(frozen=True)
class Chunks:
    """The `state` of a dispatch in chunks. The `Dispatched` around it is the first chunk."""

    chunks: list[Chunk]
    state: Any


def compute_in_chunks(experts: Experts) -> None:
    """Change `experts`, in place, to compute on one chunk after the other.

    They then return a list of what `Exchange.begin` of each chunk's way home returned.
    """
    wrap_forward(experts, _in_chunks)


def _in_chunks(
    experts: nn.Module, forward: Callable[[Dispatched], Tensor], dispatched: Dispatched
) -> Any:
    state = innermost(dispatched.state)
    if not isinstance(state, Chunks):
        return forward(dispatched)
    first, *later = state.chunks
    rows = [first.home.begin(forward(dispatched))]
    return rows + [chunk.home.begin(forward(chunk.arrive())) for chunk in later]
