"""Triton kernels of ``block_sparse.mlp``: indices of the sparse matrix.

Letters: B = 128, E experts, R block rows, N routed rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.block_sparse.mlp_reference import empty_topology
from mb_kernels.block_sparse.reference import BLOCK
from mb_kernels.runtime.launch import launch, power_of_two


@triton.jit
def pad_indices_kernel(
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    order_out_ptr,
    inverse_out_ptr,
    offsets_out_ptr,
    N,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    B: tl.constexpr,
):
    """Program r fills the rows of block row r: an expert's, or dropped slots."""
    r = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - start
    blocks = (count + B - 1) // B
    last = tl.cumsum(blocks, axis=0)  # one past the last block row of each expert
    used = tl.sum(blocks)
    mine = (last > r) & (last - blocks <= r)
    if r == 0:
        tl.store(offsets_out_ptr + e + 1, last * B, mask=e < E)
        tl.store(offsets_out_ptr, 0)

    # Where this block row starts among the rows of its expert, and where those start in order_ptr.
    kept = tl.load(offsets_ptr + E)
    first = tl.where(r < used, tl.sum(tl.where(mine, last - blocks, 0)), used)
    source = tl.where(r < used, tl.sum(tl.where(mine, start, 0)), kept)
    size = tl.where(r < used, tl.sum(tl.where(mine, count, 0)), N - kept)
    row = r * B + tl.arange(0, B)
    within = row - first * B
    slot = tl.load(order_ptr + source + within, mask=within < size, other=-1)
    tl.store(order_out_ptr + row, slot)
    tl.store(inverse_out_ptr + slot, tl.where(r < used, row, -1), mask=within < size)


@triton.jit
def topology_indices_kernel(
    starts_ptr,
    row_indices_ptr,
    column_indices_ptr,
    offsets_ptr,
    offsets_t_ptr,
    column_indices_t_ptr,
    block_offsets_t_ptr,
    block_rows,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    B: tl.constexpr,
):
    """Program p writes the blocks of block row p, and the column offsets of expert p."""
    p = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    first = tl.load(starts_ptr + e, mask=e < E, other=0) // B
    last = tl.load(starts_ptr + e + 1, mask=e < E, other=0) // B
    used = tl.load(starts_ptr + E) // B
    j = tl.arange(0, COLUMNS)
    written = j < WIDTH

    if p < block_rows:
        mine = (first <= p) & (p < last)
        expert = tl.sum(tl.where(mine, e, 0))
        expert_first = tl.sum(tl.where(mine, first, 0))
        expert_rows = tl.sum(tl.where(mine, last - first, 0))
        block = p * WIDTH + j
        tl.store(row_indices_ptr + block, tl.zeros_like(j) + p, mask=written)
        column = tl.where(p < used, expert * WIDTH + j, 0)
        tl.store(column_indices_ptr + block, column, mask=written)
        tl.store(offsets_ptr + p, tl.minimum(p, used) * WIDTH)
        in_order = expert_first * WIDTH + j * expert_rows + p - expert_first
        in_order = tl.where(p < used, in_order, block)
        tl.store(column_indices_t_ptr + in_order, tl.zeros_like(j) + p, mask=written)
        tl.store(block_offsets_t_ptr + in_order, block, mask=written)
    if p == block_rows - 1:
        tl.store(offsets_ptr + block_rows, used * WIDTH)
    if p < E:
        mine = e == p
        expert_first = tl.sum(tl.where(mine, first, 0))
        expert_rows = tl.sum(tl.where(mine, last - first, 0))
        offset = expert_first * WIDTH + j * expert_rows
        tl.store(offsets_t_ptr + p * WIDTH + j, offset, mask=written)
    if p == E - 1:
        tl.store(offsets_t_ptr + E * WIDTH, used * WIDTH)


def pad_indices(
    order: Tensor, inverse: Tensor, offsets: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: one program per block row."""
    experts = offsets.numel() - 1
    padded = order.new_empty(rows), torch.empty_like(inverse), torch.empty_like(offsets)
    if rows == 0:
        padded[2].zero_()
        return padded
    sizes = {"E": experts, "EXPERTS": power_of_two(experts), "B": BLOCK}
    arguments = (order, inverse, offsets, *padded, order.numel())
    launch(pad_indices_kernel, (rows // BLOCK,), *arguments, **sizes)
    return padded


def topology_indices(padded_offsets: Tensor, block_rows: int, width: int) -> tuple[Tensor, ...]:
    """Launch: one program per block row or expert, whichever are more."""
    experts = padded_offsets.numel() - 1
    out = empty_topology(padded_offsets, block_rows, width)
    if block_rows == 0:
        return tuple(t.zero_() for t in out)
    launch(
        topology_indices_kernel,
        (max(block_rows, experts),),
        padded_offsets,
        *out,
        block_rows,
        E=experts,
        EXPERTS=power_of_two(experts),
        WIDTH=width,
        COLUMNS=power_of_two(width),
        B=BLOCK,
    )
    return out
