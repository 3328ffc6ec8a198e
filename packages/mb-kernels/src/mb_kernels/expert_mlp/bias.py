"""Gradients of experts' biases: an expert's rows summed, in two steps and in a fixed order.

The first step sums the rows of each row tile, the second the tiles of each expert. For b2's
gradient ``Σ s do`` the first step reads ``do``, and computes ``<do, b2>`` too, b2's part of the
routing weight's gradient. For b1's gradient it reads dh once more: 2·N·F bytes of 16-bit rows
(twice that for a GLU), 1% of a step of GPT-OSS's experts. In dact's epilogue the sum would cost no
such read, but there it spilled 480 bytes on Hopper.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows, C columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.bins import row_tiles
from mb_kernels.runtime.launch import cdiv, launch

# Columns of a program, and how many of them it holds at a time.
_COLUMNS, _AT_ONCE = 256, 64


@triton.jit
def tile_sums_kernel(
    rows_ptr,  # [N, C]
    b_ptr,  # [E, C], or None
    order_ptr,  # [N] int32: slot of each row, with weights_ptr
    weights_ptr,  # [T, K], or None for 1
    tiles_ptr,  # from schedule()
    dots_ptr,  # [column blocks, N] fp32: <row, b> per column block, with b_ptr
    sums_ptr,  # [row_tiles, C] fp32: Σ s row of each tile
    rows,
    C,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr + 3):
        e = tl.load(tiles_ptr + 4 * tile).to(tl.int64)
        row = tl.load(tiles_ptr + 4 * tile + 1)
        r = row + tl.arange(0, BLOCK_M)
        m = r < tl.load(tiles_ptr + 4 * tile + 2)
        if weights_ptr is not None:
            slot = tl.load(order_ptr + r, mask=m, other=0)
            s = tl.load(weights_ptr + slot, mask=m, other=0.0).to(tl.float32)
        dot = tl.zeros((BLOCK_M,), tl.float32)
        first = tl.program_id(1) * BLOCK_C
        for start in range(first, first + BLOCK_C, STEP):
            c = start + tl.arange(0, STEP)
            at = rows_ptr + r.to(tl.int64)[:, None] * C + c[None, :]
            value = tl.load(at, mask=m[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
            if b_ptr is not None:
                b = tl.load(b_ptr + e * C + c, mask=c < C, other=0.0).to(tl.float32)
                dot += tl.sum(value * b[None, :], 1)
            if weights_ptr is not None:
                value *= s[:, None]
            # No two tiles have the same place: the next one is BLOCK_M rows further on, or of a
            # later expert. Those of one expert are neighbours.
            tl.store(sums_ptr + (row // BLOCK_M + e) * C + c, tl.sum(value, 0), mask=c < C)
        if b_ptr is not None:
            tl.store(dots_ptr + tl.program_id(1).to(tl.int64) * rows + r, dot, mask=m)


@triton.jit
def expert_sums_kernel(
    sums_ptr,  # [row_tiles, C] fp32
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, C]
    C,
    BLOCK_M: tl.constexpr,  # rows of a tile
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    e = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(offsets_ptr + e)
    tiles = tl.cdiv(tl.load(offsets_ptr + e + 1) - start, BLOCK_M)
    base = sums_ptr + (start // BLOCK_M + e).to(tl.int64) * C
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, tiles, BLOCK_R):
        at = (first + r).to(tl.int64)[:, None] * C + c[None, :]
        mask = (first + r < tiles)[:, None] & (c < C)[None, :]
        acc += tl.load(base + at, mask=mask, other=0.0)
    value = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + e.to(tl.int64) * C + c, value, mask=c < C)


def dots(columns: int) -> int:
    """How many partial sums of <row, bias> ``expert_sums`` writes for rows of so many columns."""
    return cdiv(columns, _COLUMNS)


def expert_sums(
    rows: Tensor,
    tiles: Tensor,
    block_m: int,
    offsets: Tensor,
    bias: Tensor,
    *,
    weighted: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """[E, C], like ``bias``: the sum of each expert's rows [N, C].

    tiles lists the tiles of ``block_m`` rows. ``weighted`` is order [N], weights [T, K], by which
    rows are multiplied, and ``dots(C)`` rows of [.., N] fp32, which get <row, bias> in parts.
    """
    (count, columns), experts = rows.shape, bias.shape[0]
    order, weights, parts = weighted or (None, None, None)
    sums = rows.new_empty((row_tiles(count, experts, block_m), columns), dtype=torch.float32)
    launch(
        tile_sums_kernel,
        (sums.shape[0], cdiv(columns, _COLUMNS)),
        rows,
        bias if weighted else None,
        order,
        weights,
        tiles,
        parts,
        sums,
        count,
        columns,
        BLOCK_M=block_m,
        BLOCK_C=_COLUMNS,
        STEP=_AT_ONCE,
    )
    out = bias.new_empty(bias.shape)
    launch(
        expert_sums_kernel,
        (experts, cdiv(columns, _COLUMNS)),
        sums,
        offsets,
        out,
        columns,
        BLOCK_M=block_m,
        BLOCK_R=16,
        BLOCK_C=_COLUMNS,
    )
    return out
