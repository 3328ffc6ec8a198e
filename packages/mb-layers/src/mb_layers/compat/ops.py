"""Stands in for `megablocks.ops`: its calls, on the kernels of mb-kernels and on torch.

    tokens_per_expert = ops.histogram(top_experts, num_experts)
    bin_ids, indices = ops.sort(top_experts)
    bins = ops.inclusive_cumsum(tokens_per_expert, 0)
    rows = ops.gather(x, indices, bin_ids, bins, top_k)
    y = ops.scatter(rows, indices, bin_ids, weights, bins, top_k)

`indices` are slots (token * top_k + choice), by expert; `bin_ids` the experts of these; `bins` the
slots of each expert and all before it. `mb_kernels.bin_tokens` makes all of them in two launches.

Moves of rows are differentiable in rows and weights, and deterministic. They wait for the device
where MegaBlocks does alone: in `padded_gather`, whose result is as long as `padded_bins` says, and
for a capacity that is a tensor. Under autocast rows are in its dtype, as there. A size of 1 stays a
dimension where MegaBlocks returns a number.

Letters: T tokens, D hidden, K top-k, S slots, E experts, C capacity, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels import Bins
from torch import Tensor

from mb_layers.arguments import described, floating, integers
from mb_layers.tensors import cast_alike

_INTEGERS = (torch.int16, torch.int32, torch.int64)


def sort(x: Tensor, end_bit: int | None = None) -> tuple[Tensor, Tensor]:
    """Sort integers [S] stably; return them and where each was, in the dtype of `x`.

    Args:
        end_bit: how many bits can be set. Nothing depends on it here.

    Raises:
        ValueError: no integers [S], or more than their dtype counts.
    """
    _integers(1, x=x)
    if x.numel() > torch.iinfo(x.dtype).max:
        raise ValueError(f"expected as many as {x.dtype} counts, got {x.numel()}: take int32")
    values, places = x.sort(stable=True)
    return values, places.to(x.dtype)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """Count how often 0 to `num_bins` - 1 are in `x` [S], or in each row of [B, S], as int32.

    Raises:
        ValueError: no integers, or of more dimensions.
    """
    _integers(2, x=x)
    integers(0, num_bins=num_bins)
    rows = x.long() if x.ndim == 2 else x.long()[None]
    known = torch.where((rows >= 0) & (rows < num_bins), rows, num_bins)
    counts = torch.zeros((len(rows), num_bins + 1), dtype=torch.int32, device=x.device)
    counts.scatter_add_(1, known, torch.ones_like(known, dtype=torch.int32))
    return counts[:, :num_bins].reshape(*x.shape[:-1], num_bins)


def inclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """Sum integers up to and with each, in their dtype."""
    _integers(2, x=x)
    return x.cumsum(dim, dtype=x.dtype)


def exclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    """Sum integers before each, in their dtype."""
    return inclusive_cumsum(x, dim) - x


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Copy tokens [T, D] to rows [S, D]: row r is of slot indices[r]."""
    return _gathered(x, _in_order(indices, _slots(x, top_k)), top_k)


def scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    top_k: int,
    num_bits: int = -1,
) -> Tensor:
    """Sum the rows [S, D] of each token, times the weights [S] of its slots; back to [T, D].

    Args:
        num_bits: in how few bits MegaBlocks of 2023 kept `x`. Nothing is rounded here.
    """
    return _combined(x, _in_order(indices, indices.numel()), weights, top_k)


def padded_gather(
    x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor, top_k: int
) -> Tensor:
    """`gather` to rows [R, D], where expert e has those up to padded_bins[e], filled up with 0."""
    places = _padded(indices, bin_ids, bins, padded_bins)
    rows = int(padded_bins[-1]) if len(padded_bins) else 0
    return _gathered(x, _placed(indices, places, rows, _slots(x, top_k)), top_k)


def padded_scatter(
    x: Tensor,
    indices: Tensor,
    bin_ids: Tensor,
    weights: Tensor | None,
    bins: Tensor,
    padded_bins: Tensor,
    top_k: int,
    num_bits: int = -1,
) -> Tensor:
    """`scatter` of the rows [R, D] of `padded_gather`."""
    places = _padded(indices, bin_ids, bins, padded_bins)
    return _combined(x, _placed(indices, places, len(x), indices.numel()), weights, top_k)


def binned_gather(
    x: Tensor, indices: Tensor, bins: Tensor, expert_capacity: int | Tensor, top_k: int
) -> Tensor:
    """`gather` to [E, C, D], filled up with 0, without the slots behind an expert's first C."""
    capacity, experts = int(expert_capacity), bins.numel()
    integers(0, expert_capacity=capacity)
    places = _within(indices, bins, capacity)
    placed = _placed(indices, places, experts * capacity, _slots(x, top_k))
    return _gathered(x, placed, top_k).view(experts, capacity, x.shape[-1])


def binned_scatter(
    x: Tensor, indices: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """`scatter` of the rows [E, C, D] of `binned_gather`; slots without one add nothing."""
    if x.ndim != 3:
        raise ValueError(f"expected rows [experts, capacity, hidden], got {described(x)}")
    rows = x.reshape(-1, x.shape[-1])
    places = _within(indices, bins, x.shape[1])
    return _combined(rows, _placed(indices, places, len(rows), indices.numel()), weights, top_k)


def replicate(x: Tensor, bins: Tensor, num_outputs: int) -> Tensor:
    """Repeat values [B, E] over the bins: [B, num_outputs], 0 behind the last of them."""
    _integers(1, bins=bins)
    integers(0, num_outputs=num_outputs)
    position = torch.arange(num_outputs, device=x.device)
    of_bin = torch.searchsorted(bins.long(), position, right=True)
    return F.pad(x, (0, 1))[:, of_bin]


def repeat(x: Tensor, tiling: Sequence[int]) -> Tensor:
    """Tile `x`, or return it as it is if there is nothing to repeat."""
    return x if all(times == 1 for times in tiling) else x.repeat(*tiling)


def round_up(x: Tensor, value: int) -> Tensor:
    """Round integers up to multiples of `value`."""
    _integers(None, x=x)
    integers(1, value=value)
    return (x + (value - 1)) // value * value


def sum(x: Tensor, dim: int = 0) -> Tensor:
    """Sum over a dimension."""
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


def topology(
    padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int
) -> Tensor:
    """Say in which block columns the blocks of a dMoE's sparse matrix are, row after row.

    Args:
        padded_bins: [E], multiples of `block_size`.
        output_block_rows: rows of blocks of all experts.
        output_block_columns: columns of blocks of one expert, which are as many in each row.

    Returns:
        [output_block_rows * output_block_columns], int16, or int32 where there are more columns
        than int16 counts.
    """
    _integers(1, padded_bins=padded_bins)
    integers(1, block_size=block_size)
    integers(0, output_block_rows=output_block_rows, output_block_columns=output_block_columns)
    row = torch.arange(output_block_rows, device=padded_bins.device)
    expert = torch.searchsorted(padded_bins.long() // block_size, row, right=True)
    column = torch.arange(output_block_columns, device=padded_bins.device)
    columns = (expert[:, None] * output_block_columns + column).flatten()
    few = padded_bins.numel() * output_block_columns <= 2**15
    return columns.to(torch.int16 if few else torch.int32)


def _integers(most: int | None, **tensors: Any) -> None:
    """Check tensors of integers, of 1 to `most` dimensions, by the names of the arguments."""
    for name, x in tensors.items():
        whole = isinstance(x, Tensor) and x.dtype in _INTEGERS
        if not whole or (most is not None and not 1 <= x.ndim <= most):
            shape = {None: "", 1: " [n]", 2: " [n] or [b, n]"}[most]
            raise ValueError(
                f"expected {name} to be int16, int32 or int64{shape}, got {described(x)}"
            )


def _slots(x: Tensor, top_k: int) -> int:
    integers(1, top_k=top_k)
    return len(x) * top_k


def _in_order(indices: Tensor, slots: int) -> Bins:
    """Bins whose row r holds slot indices[r]."""
    _integers(1, indices=indices)
    places = torch.arange(indices.numel(), device=indices.device)
    return _placed(indices, places, indices.numel(), slots)


def _placed(indices: Tensor, places: Tensor, rows: int, slots: int) -> Bins:
    """Bins of so many rows and slots, of which slot indices[i] has row places[i], or none at -1.

    Raises:
        ValueError: more indices than slots.
    """
    if indices.numel() > slots:
        raise ValueError(
            f"expected at most {slots} indices, top_k for each token, got {indices.numel()}"
        )
    where = torch.where(places >= 0, places, rows)
    order = torch.full((rows + 1,), -1, dtype=torch.int32, device=indices.device)
    order.scatter_(0, where, indices.to(torch.int32))
    inverse = torch.full((slots,), -1, dtype=torch.int32, device=indices.device)
    inverse.scatter_(0, indices.long(), places.to(torch.int32))
    ends = torch.arange(2, dtype=torch.int32, device=indices.device) * rows
    return Bins(order[:rows], inverse, ends.diff(), ends)


def _padded(indices: Tensor, bin_ids: Tensor, bins: Tensor, padded_bins: Tensor) -> Tensor:
    """The row of each of `indices`, where experts begin at multiples of a block's height."""
    _integers(1, indices=indices, bin_ids=bin_ids, bins=bins, padded_bins=padded_bins)
    shift = F.pad(padded_bins, (1, 0)) - F.pad(bins, (1, 0))
    position = torch.arange(indices.numel(), device=indices.device)
    return position + shift[bin_ids.long()]


def _within(indices: Tensor, bins: Tensor, capacity: int) -> Tensor:
    """The row of each of `indices`, where each expert has `capacity` of them; -1 beyond it."""
    _integers(1, indices=indices, bins=bins)
    position = torch.arange(indices.numel(), device=indices.device)
    expert = torch.searchsorted(bins.long(), position, right=True)
    place = position - F.pad(bins, (1, 0)).long()[expert]
    kept = (place < capacity) & (expert < bins.numel())
    return torch.where(kept, expert * capacity + place, -1)


def _gathered(x: Tensor, bins: Bins, top_k: int) -> Tensor:
    floating(x=x)
    (x,) = cast_alike(x)
    return mb_kernels.gather(x, bins, top_k)


def _combined(rows: Tensor, bins: Bins, weights: Tensor | None, top_k: int) -> Tensor:
    integers(1, top_k=top_k)
    floating(x=rows)
    (rows,) = cast_alike(rows)
    if weights is None:
        weights = torch.ones(bins.inverse_N.numel(), device=rows.device)
    return mb_kernels.combine(rows, bins, weights.reshape(-1, top_k))
