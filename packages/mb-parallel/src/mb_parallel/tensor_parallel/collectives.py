"""Collectives in pairs, each the other's backward, on plain tensors; the last is its own.

    forward                       backward
    copy      nothing             sum over the ranks      into a region, where each rank
    reduce    sum over the ranks  nothing                 computes a part, and out of it
    gather    concatenate         sum, keep own slice     the same two, if outside of the region
    scatter   sum, keep own slice concatenate             tokens are spread over the ranks
    split     keep own slice      concatenate             if all ranks hold the same tensor and
    join      concatenate         keep own slice          compute the same with it
    exchange  to each its slice   to each its slice       from one way of spreading to another

(Megatron-LM's regions, arXiv 1909.08053 and, with sequence parallelism, 2205.05198; the exchange is
DeepSpeed-Ulysses', 2309.14509, see `mb_parallel.context_parallel`.) `dim` is the dimension that is
spread. The number of ranks has to divide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Collective = Callable[[Tensor, ProcessGroup, int], Tensor]


def copy(x: Tensor, group: ProcessGroup) -> Tensor:
    """x itself; its gradients are added up over the ranks."""
    return _Pair.apply(x, group, 0, _same, _sum)


def reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks; the gradient, the same on every rank, is passed on."""
    return _Pair.apply(x, group, 0, _sum, _same)


def gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All ranks' slices in one; each rank gets the sum of the gradients of its slice."""
    return _Pair.apply(x, group, dim, _concatenate, _sum_of_slice)


def scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's slice of the sum over the ranks."""
    return _Pair.apply(x, group, dim, _sum_of_slice, _concatenate)


def split(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's slice of a tensor that is equal on all ranks."""
    return _Pair.apply(x, group, dim, _slice, _concatenate)


def join(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All ranks' slices in one, with which all ranks compute the same."""
    return _Pair.apply(x, group, dim, _concatenate, _slice)


def exchange(x_P: Tensor, group: ProcessGroup) -> Tensor:
    """Of x [ranks, ...] the r-th slice goes to rank r, from which the r-th of the result comes."""
    return _Pair.apply(x_P, group, 0, _exchanged, _exchanged)


def own_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's slice, a view. The other slices get no gradient from this rank."""
    return _slices(x, group, dim)[group.rank()]


def stacked(x: Tensor, group: ProcessGroup) -> Tensor:
    """The x of every rank, [ranks, *x.shape], without a gradient."""
    return rows_of_ranks(x, group).view(group.size(), *x.shape)


def rows_of_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The rows of every rank's x, one rank's behind the other's, without a gradient."""
    rows = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather(rows, x.contiguous(), group=group)
    return rows


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, dim: int, there: Collective, back: Collective
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.there, ctx.back = group, dim, there, back
        return there(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, there, back = ctx.group, ctx.dim, ctx.there, ctx.back
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return _Pair.apply(grads[0], group, dim, back, there), None, None, None, None
        return back(grads[0], group, dim), None, None, None, None


def _same(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return _new(total)


def _new(x: Tensor) -> Tensor:
    # In a graph of torch 2.11's compiler, what a collective wrote in place has a gradient of zeros.
    # No view: autograd would not let a model write into what it gets, as into x += y. A clone costs
    # nothing in there, for the compiler leaves it out.
    return x.clone() if torch.compiler.is_compiling() else x


def _concatenate(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    if dim:
        return torch.cat(stacked(x, group).unbind(), dim)
    return _new(rows_of_ranks(x, group))


def _sum_of_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    slices = torch.stack(_slices(x, group, dim))
    mine = torch.empty_like(slices[0])
    _reduce_scatter(mine, slices.flatten(0, 1), group=group)
    return _new(mine)


def _exchanged(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    # A gradient comes as it was left, and what is empty like it may have gaps in memory, too.
    theirs = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(theirs, x.contiguous(), group=group)
    return _new(theirs)


def _slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return own_slice(x, group, dim).clone(memory_format=torch.contiguous_format)


def _slices(x: Tensor, group: ProcessGroup, dim: int) -> tuple[Tensor, ...]:
    size, ranks = x.shape[dim], group.size()
    if size % ranks:
        raise ValueError(
            f"Expected tp = {ranks} to divide dimension {dim} of {tuple(x.shape)}, which is spread "
            f"over the tensor-parallel ranks; got {size}. Pad sequences to a multiple of {ranks}."
        )
    return x.split(size // ranks, dim)
