"""Rows between the ranks of a group: pairs of autograd functions, each the other's backward.

| forward | backward |
|---|---|
| `gather_rows`: every rank gets the rows of all | `sum_rows` |
| `sum_rows`: the sum over the ranks of what each has for this rank's rows | `gather_rows` |
| `exchange_rows`: to each rank the rows meant for it | `exchange_rows`, the other way |
| `split_rows`: of rows that all have, this rank's share | `join_rows` |
| `join_rows`: all shares, on every rank | `split_rows` |
| `mean_over`: the mean over the ranks | the gradient over P |

Sums run in fp32 (fp64 for fp64) in the order of ranks: twice the same bits. A collective that fails
says at which rank, in which layer and step; usually it is another rank that died.

`torch.compile` breaks its graph here. That, and the place in the message, is what `split_rows` and
`join_rows` have beside tensor parallelism's `split` and `join`.

Letters: P ranks, R rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mb_kernels.derivatives import once_differentiable
from mb_kernels.uncompiled import uncompiled
from torch import Tensor

from mb_parallel.tensor_parallel.collectives import rows_of_ranks

Collective = Callable[[Tensor, "Place"], Tensor]


@dataclass(frozen=True)
class Place:
    """A process group, and where in the model it is used, for messages."""

    group: dist.ProcessGroup
    layer: str = "an MoE layer"

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def __deepcopy__(self, memo: Any) -> Place:
        return self  # the copy of a model works with the same ranks

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Turn the failure of a collective into an error that says who, where and with whom."""
        try:
            yield
        except torch.OutOfMemoryError:  # no other rank's fault, and callers look for it
            raise
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self.group)
            raise RuntimeError(
                f"rank {dist.get_rank()} could not {name} in {self.layer} with ranks {ranks}: "
                f"{error}\nIf another of these ranks died, its own error is the cause. If none "
                "did, they called the layer unequally often: let each run as many passes in a "
                "step, those without tokens that have no micro-batch left."
            ) from error


@uncompiled
def gather_rows(x_RD: Tensor, place: Place) -> Tensor:
    """Rows of all ranks, [P R, D] in the order of ranks; every rank brings as many rows."""
    return _Pair.apply(x_RD, place, gathered, _summed)


@uncompiled
def sum_rows(x_PRD: Tensor, place: Place) -> Tensor:
    """Given [P R, D], the r-th R rows of which are for rank r: the sum over ranks of ours."""
    return _Pair.apply(x_PRD, place, _summed, gathered)


@uncompiled
def exchange_rows(x_SD: Tensor, to: Sequence[int], from_: Sequence[int], place: Place) -> Tensor:
    """Send all rows of x, `to[r]` of them to rank r in their order; return `from_[r]` from each."""
    to, from_ = list(to), list(from_)

    def there(x_SD: Tensor, place: Place) -> Tensor:
        return _exchanged(x_SD, to, from_, place)

    def back(grad: Tensor, place: Place) -> Tensor:
        return _exchanged(grad, from_, to, place)

    return _Pair.apply(x_SD, place, there, back)


@uncompiled
def split_rows(x_RD: Tensor, place: Place) -> Tensor:
    """This rank's P-th of rows that all ranks hold alike; P divides R."""
    return _Pair.apply(x_RD, place, _share, gathered)


@uncompiled
def join_rows(x_RD: Tensor, place: Place) -> Tensor:
    """The shares of all ranks in their order; what follows is alike on all ranks."""
    return _Pair.apply(x_RD, place, gathered, _share)


@uncompiled
def counts_of_ranks(counts: Tensor, place: Place) -> list[list[int]]:
    """Integers [n] of every rank, on the host: the one place where it waits for the device."""
    with place.step("exchange counts"):
        return rows_of_ranks(counts[None], place.group).tolist()


def longest_of_ranks(tokens: int, place: Place, device: torch.device) -> int:
    """The most tokens that a rank brings; the host waits for the device."""
    mine = torch.tensor([tokens], dtype=torch.int32, device=device)
    return max(theirs for (theirs,) in counts_of_ranks(mine, place))


@uncompiled
def mean_over(x: Tensor, place: Place) -> Tensor:
    """The mean over the ranks, alike on all; each rank's x counts for a P-th of it."""
    return _Pair.apply(x, place, _mean, lambda grad, place: grad / place.size)


def gathered(x_RD: Tensor, place: Place) -> Tensor:
    """`gather_rows` without a gradient."""
    with place.step("gather rows"):
        return rows_of_ranks(x_RD, place.group)


def _summed(x_PRD: Tensor, place: Place) -> Tensor:
    received = torch.empty_like(x_PRD, memory_format=torch.contiguous_format)
    with place.step("sum rows"):
        dist.all_to_all_single(received, x_PRD.contiguous(), group=place.group)
    accumulator = torch.float64 if x_PRD.dtype is torch.float64 else torch.float32
    by_rank = received.view(place.size, -1, *x_PRD.shape[1:])
    return by_rank.sum(dim=0, dtype=accumulator).to(x_PRD.dtype)


def _exchanged(x_SD: Tensor, to: list[int], from_: list[int], place: Place) -> Tensor:
    out = x_SD.new_empty((sum(from_), *x_SD.shape[1:]))
    with place.step("exchange rows"):
        dist.all_to_all_single(out, x_SD.contiguous(), from_, to, group=place.group)
    return out


def _share(x_RD: Tensor, place: Place) -> Tensor:
    return x_RD.chunk(place.size)[place.rank].clone(memory_format=torch.contiguous_format)


def _mean(x: Tensor, place: Place) -> Tensor:
    return gathered(x[None], place).mean(dim=0)


class _Pair(torch.autograd.Function):
    """`there` forward, `back` for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, there: Collective, back: Collective) -> Tensor:
        ctx.place, ctx.back = place, back
        return there(x, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.place), None, None, None
