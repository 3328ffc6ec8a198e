"""Reference of ``mb_kernels.block_sparse.mlp``: where the blocks of an expert layer are.

Letters: N routed rows, E experts, F ffn width, R padded rows.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mb_kernels.bins import Bins, offsets_list
from mb_kernels.block_sparse.reference import BLOCK, Topology, make_matrix
from mb_kernels.expert_mlp.reference import expert_mlp

if TYPE_CHECKING:
    import stk

# Block-sparse or not, the result is the same.
sparse_expert_mlp = expert_mlp


def padded_rows(rows: int, num_experts: int) -> int:
    """The most rows R that ``rows`` routed rows can need when each expert's are padded to 128."""
    # One expert's padding is at most 127; dropped slots need a place behind the last expert's.
    return -(-(rows + (BLOCK - 1) * min(num_experts, rows)) // BLOCK) * BLOCK


def pad_bins(bins: Bins) -> Bins:
    """Twin of ``mb_kernels.pad_bins``."""
    rows = padded_rows(bins.order_N.numel(), bins.offsets_E1.numel() - 1)
    order, inverse, offsets = pad_indices(bins.order_N, bins.inverse_N, bins.offsets_E1, rows)
    return Bins(order, inverse, bins.tokens_per_expert_E, offsets)


def topology(padded_bins: Bins, ffn_hidden_size: int, *, dtype: torch.dtype) -> "stk.Matrix":
    """Twin of ``mb_kernels.topology``."""
    block_rows, width = padded_bins.order_N.numel() // BLOCK, ffn_hidden_size // BLOCK
    indices = topology_indices(padded_bins.offsets_E1, block_rows, width)
    return make_pattern(padded_bins, ffn_hidden_size, indices, dtype)


def make_pattern(
    padded_bins: Bins, ffn_hidden_size: int, indices: Topology, dtype: torch.dtype
) -> "stk.Matrix":
    """A Matrix [R, E·F] whose data is one element, repeated: it has no storage to speak of."""
    element = torch.zeros((1, 1, 1), dtype=dtype, device=padded_bins.order_N.device)
    experts = padded_bins.offsets_E1.numel() - 1
    size = (padded_bins.order_N.numel(), experts * ffn_hidden_size)
    return make_matrix(size, element.expand(indices.row_indices.numel(), BLOCK, BLOCK), indices)


def pad_indices(
    order_N: Tensor, inverse_N: Tensor, offsets_E1: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order [rows], inverse and offsets with each expert's rows filled up to a multiple of 128.

    Padding rows have order -1; behind the last expert's rows come the dropped slots.
    """
    offsets_list(offsets_E1, order_N.numel())  # raises if they divide no rows
    offsets = offsets_E1.long()
    padded = torch.zeros_like(offsets)
    padded[1:] = ((offsets.diff() + BLOCK - 1) // BLOCK * BLOCK).cumsum(0)
    position = torch.arange(order_N.numel(), device=offsets.device)
    taken = position < offsets[-1]
    expert = torch.searchsorted(offsets[1:].contiguous(), position, right=True)
    row = position[taken] + (padded[:-1] - offsets[:-1])[expert[taken]]
    order = order_N.new_full((rows,), -1)
    order[row] = order_N[taken]
    dropped = order_N[~taken]
    order[padded[-1] : padded[-1] + dropped.numel()] = dropped
    inverse = inverse_N.new_full(inverse_N.shape, -1)
    inverse[order_N[taken].long()] = row.to(inverse.dtype)
    return order, inverse, padded.to(offsets_E1.dtype)


def empty_topology(padded_offsets: Tensor, block_rows: int, width: int) -> tuple[Tensor, ...]:
    """Uninitialised tensors of the sizes that ``topology_indices`` returns."""
    experts, blocks = padded_offsets.shape[0] - 1, block_rows * width
    sizes = (blocks, blocks, block_rows + 1, experts * width + 1, blocks, blocks)
    return tuple(padded_offsets.new_empty(size) for size in sizes)


def topology_indices(padded_offsets_E1: Tensor, block_rows: int, width: int) -> Topology:
    """Expert e's rows times its own ``width`` block columns: blocks on a ragged diagonal."""
    starts = padded_offsets_E1.long() // BLOCK
    experts = starts.numel() - 1
    device = starts.device
    row = torch.arange(block_rows, device=device)
    expert = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    used = row < starts[-1]
    step = torch.arange(width, device=device)
    columns = torch.where(used[:, None], expert[:, None] * width + step, 0)
    in_columns = (starts[:-1, None] * width + step * starts.diff()[:, None]).flatten()

    blocks = torch.arange(block_rows * width, device=device)
    # Column order: by column, then by row. Unused blocks sort behind and stay where they are.
    behind = (blocks + experts * width * block_rows).view(block_rows, width)
    key = torch.where(used[:, None], columns * block_rows + row[:, None], behind)
    permutation = key.flatten().argsort()
    tensors = (
        row.repeat_interleave(width),
        columns.flatten(),
        torch.arange(block_rows + 1, device=device).clamp(max=starts[-1]) * width,
        torch.cat([in_columns, starts[-1:] * width]),
        permutation // width,
        permutation,
    )
    return Topology(*(t.to(torch.int32) for t in tensors))
