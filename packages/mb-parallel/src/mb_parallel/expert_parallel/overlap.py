"""Rows under way while experts compute: an exchange in two halves, and experts that run in chunks.

A rank's tokens are cut into chunks. All chunks set out at once; while the experts compute on one,
the next is under way, and so are the results of the one before:

    exchange   chunk 0 | chunk 1 | home 0  | home 1       The backward pass is the mirror image:
    experts            | chunk 0 | chunk 1 |              what began an exchange ends one there.

On a GPU the collectives have a stream of their own, on a CPU threads. Each chunk reads the experts'
weights once more, and adds its weight gradients to the others'.

Letters: S rows to send, R received rows, D columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mb_layers.dispatch import Dispatched
from mb_layers.experts import Experts
from torch import Tensor
from torch._compile import _disable_dynamo

from mb_parallel.expert_parallel.collectives import Place


class Exchange:
    """One exchange of rows, and its way back in the backward pass: each begun, and awaited later.

    Nothing may read what `begin` returned but `end`, nor may anything else lie between the two.

    Args:
        to: rows for each rank, in the order they lie; those beyond stay, and get no gradient.
        from_: rows from each rank.
        total: rows of the result, at least `sum(from_)`; the last are left unwritten.
    """

    def __init__(
        self, to: Sequence[int], from_: Sequence[int], place: Place, *, total: int | None = None
    ) -> None:
        self.to, self.from_, self.place = list(to), list(from_), place
        self.total = sum(from_) if total is None else total
        self.rows = 0  # of what `begin` was given
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    @_disable_dynamo
    def begin(self, x_SD: Tensor) -> Tensor:
        """Send the rows of x off; the result [total, D] has not arrived."""
        return _Begin.apply(x_SD, self)

    @_disable_dynamo
    def end(self, x_RD: Tensor) -> Tensor:
        """What `begin` returned, arrived."""
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
        """What is under way, arrived."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        grad_SD = ctx.exchange.wait()  # the true one; autograd's own hand-over was for its order
        grad_SD[sum(ctx.exchange.to) :].zero_()
        return grad_SD, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return x_RD.view_as(x_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        exchange: Exchange = ctx.exchange
        exchange.send(grad_RD, exchange.from_, exchange.to, exchange.rows)
        return grad_RD, None


class Chunk:
    """One chunk of a dispatch: on its way to the experts here, or on its way home.

    Args:
        arrive: what the experts compute on; waits for it.
        home: the way back of their rows.
    """

    def __init__(self, arrive: Callable[[], Dispatched], home: Exchange) -> None:
        self.arrive, self.home = arrive, home


class Chunks:
    """The `state` of a dispatch in chunks; what was dispatched itself is the first, arrived."""

    def __init__(self, chunks: Iterable[Chunk], state: Any) -> None:
        self.chunks, self.state = list(chunks), state


def compute_in_chunks(experts: Experts) -> None:
    """Let `experts` take what was dispatched in chunks, one after the other, in place.

    They return then the rows of each chunk, on their way home.
    """
    experts.forward = functools.partial(_in_chunks, experts.forward)


def _in_chunks(forward: Callable[[Dispatched], Tensor], dispatched: Dispatched) -> Any:
    state = dispatched.state
    while not isinstance(state, Chunks) and hasattr(state, "inner"):
        state = state.inner
    if not isinstance(state, Chunks):
        return forward(dispatched)
    first, *later = state.chunks
    rows = [first.home.begin(forward(dispatched))]
    return rows + [chunk.home.begin(forward(chunk.arrive())) for chunk in later]
