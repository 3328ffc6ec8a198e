"""Rows sorted by expert times per-expert weights: down-projection, dX, and ``grouped_gemm``.

With one choice per token (K = 1) the result may go straight to its token's row, scaled by the
routing weight, which saves the combine.

Letters: N rows, K contraction, M output columns, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.bins import row_tiles
from mb_kernels.language.memory import home_rows, load_bias, scaled, store_rows
from mb_kernels.language.tiles import first_item, halves, locate, multiply_rows
from mb_kernels.runtime.descriptors import matrices, ragged
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import Plan, plan_of
from mb_kernels.runtime.scales import Scales, pointers, result
from mb_kernels.targets.table import DECODED_ROWS, FEW_ROWS, Tile


@triton.jit
def grouped_gemm_kernel(
    x,  # [N, K]: ragged tensor descriptor or pointer
    w,  # [E, M, K] or [E, K, M]: tensor descriptor or pointer
    x_scales_ptr,  # [N] fp32: of the rows of x in fp8; or None
    w_scales_ptr,  # [E, M] fp32: of the columns of the product; or None
    bias_ptr,  # [E, M]: added to the product; or None
    order_ptr,  # [N] int32: output row of each row; or None: its own
    weights_ptr,  # [N] by slot, with order_ptr; or None for 1
    tiles_ptr,  # from schedule()
    y,  # [N, 1, M]: ragged tensor descriptor, or pointer with order_ptr or without DESCRIPTORS
    home_ptr,  # int64 [P]: where each rank's rows go instead, with order_ptr; or None
    region,  # rows of a rank there
    K: tl.constexpr,
    M: tl.constexpr,
    TRANSPOSE: tl.constexpr,  # w is [E, M, K]
    FILL: tl.constexpr,  # write zeros to the rows of dropped slots
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    COLUMNS: tl.constexpr = (M + BLOCK_N - 1) // BLOCK_N
    EVEN_M: tl.constexpr = M % BLOCK_N == 0
    W: tl.constexpr = BLOCK_N // 2
    total = tl.load(tiles_ptr + 3)
    first = first_item(XCDS, True)
    r = tl.arange(0, BLOCK_M)
    for item in tl.range(first, total * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        e, row, row_end, column = locate(item, total, tiles_ptr, COLUMNS, GROUP_M)
        tl.assume(e >= 0)
        col = column * BLOCK_N
        count = row_end - row
        m = r < count
        acc = multiply_rows(x, w, e, row, count, col, K, M, TRANSPOSE, DESCRIPTORS, PRECISION,
                            BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        # Two stores of half the columns need half the registers and shared memory of one.
        left, right = halves(acc)
        x_scales = None
        if x_scales_ptr is not None:
            x_scales = tl.load(x_scales_ptr + row + r, mask=m, other=0.0)
        left = scaled(left, x_scales, w_scales_ptr, e, 0, 1, col, M, BLOCK_N)
        right = scaled(right, x_scales, w_scales_ptr, e, 0, 1, col + W, M, BLOCK_N)
        if bias_ptr is not None:
            left += load_bias(bias_ptr, e, 0, 1, col, M, BLOCK_N, W)
            right += load_bias(bias_ptr, e, 0, 1, col + W, M, BLOCK_N, W)
        if order_ptr is not None:
            slot = tl.load(order_ptr + row + r, mask=m, other=0)
            y_row = home_rows(y, home_ptr, region, slot, m, M)
            if weights_ptr is not None:
                s = tl.load(weights_ptr + slot, mask=m, other=0.0).to(tl.float32)[:, None]
                left *= s
                right *= s
            cols = (col + tl.arange(0, W))[None, :]
            kind = y.dtype.element_ty
            mask = m[:, None] if EVEN_M else m[:, None] & (cols < M)
            tl.store(y_row + cols, left.to(kind), mask=mask)
            cols += W
            mask = m[:, None] if EVEN_M else m[:, None] & (cols < M)
            tl.store(y_row + cols, right.to(kind), mask=mask)
        else:
            store_rows(y, left, 0, 1, row, count, col, M, BLOCK_N, DESCRIPTORS)
            store_rows(y, right, 0, 1, row, count, col + W, M, BLOCK_N, DESCRIPTORS)
    if FILL:
        # A product for them would double the work where half of the slots are other ranks'.
        dropped = tl.load(tiles_ptr + 7) - total
        for item in tl.range(first, dropped * COLUMNS * 2, tl.num_programs(0)):
            tile = tiles_ptr + 4 * (total + item // (COLUMNS * 2))
            row = tl.load(tile + 1)
            count = tl.load(tile + 2) - row
            col = item % (COLUMNS * 2) * W
            zeros = tl.zeros((BLOCK_M, W), tl.float32)
            if order_ptr is not None:
                slot = tl.load(order_ptr + row + r, mask=r < count, other=0)
                cols = (col + tl.arange(0, W))[None, :]
                mask = (r < count)[:, None] & (cols < M)
                at = y + slot.to(tl.int64)[:, None] * M + cols
                tl.store(at, zeros.to(y.dtype.element_ty), mask=mask)
            else:
                store_rows(y, zeros, 0, 1, row, count, col, M, BLOCK_N, DESCRIPTORS)


def rows_tile(plan: Plan, rows: int, experts: int, *, transpose_weight: bool) -> Tile:
    """The tile of ``rows_times_weights`` for that many rows."""
    op = "down" if transpose_weight else "dx"
    if rows <= DECODED_ROWS * experts and plan.has(f"{op}_decode"):
        return plan.tile(f"{op}_decode")
    few = rows <= FEW_ROWS * experts and plan.has(f"{op}_few_rows")
    return plan.tile(f"{op}_few_rows" if few else op)


def rows_times_weights(
    x: Tensor,
    w: Tensor,
    tiles: Tensor,
    *,
    transpose_weight: bool,
    tile: Tile,
    scales: Scales | None = None,
    bias: Tensor | None = None,
    scatter_order: Tensor | None = None,
    scatter_inverse: Tensor | None = None,
    scale: Tensor | None = None,
    fill_dropped: bool,
    home: Tensor | None = None,
) -> Tensor:
    """[N, M]: row r times its expert's weight, plus its expert's row of ``bias`` [E, M].

    ``scales``: x and w are codes, and these their scales.
    ``scatter_order`` sends row r to row scatter_order[r] of as many as ``scatter_inverse`` has,
    scaled by ``scale`` there. If these are more than N, those that none is sent to are zero where
    ``scatter_inverse`` is negative, and NaN where it says that one should be.
    ``fill_dropped`` writes zeros to the rows of no expert, which are left unwritten otherwise.
    ``home``, int64 [P]: the scattered rows belong to P ranks, N / P to each, and are stored at
    these addresses. Then no row is filled with zeros, and what is returned means nothing.
    """
    experts = w.shape[0]
    columns = w.shape[1 if transpose_weight else 2]
    depth = x.shape[1]
    dtype = result(x, scales)
    y = x.new_empty((x.shape[0], columns) if home is None else 0, dtype=dtype)
    scatter_rows = 0 if scatter_inverse is None else scatter_inverse.shape[0]
    if home is None and scatter_inverse is not None and scatter_rows > x.shape[0]:
        unsent = torch.where(scatter_inverse < 0, 0.0, torch.nan).to(dtype)
        y = unsent[:, None].repeat(1, columns)
    plan = plan_of(x)
    x_arg, w_arg, y_arg = x, w, y
    if plan.descriptors:
        if scatter_order is None:
            y_arg = ragged(y, (tile.block_m, 1, tile.block_n // 2), parts=1)
        x_arg = ragged(x, (tile.block_m, tile.block_k))
        block = (tile.block_n, tile.block_k) if transpose_weight else (tile.block_k, tile.block_n)
        w_arg = matrices(w, (1, *block))
    items = row_tiles(x.shape[0], experts, tile.block_m) * cdiv(columns, tile.block_n)
    launch(
        grouped_gemm_kernel,
        (plan.programs(items, tile),),
        x_arg,
        w_arg,
        *pointers(scales),
        bias,
        scatter_order,
        scale,
        tiles,
        y_arg,
        home,
        1 if home is None else scatter_rows // home.shape[0],
        K=depth,
        M=columns,
        TRANSPOSE=transpose_weight,
        FILL=fill_dropped and home is None,
        DESCRIPTORS=plan.descriptors,
        PRECISION=plan.precision,
        XCDS=plan.xcds,
        **tile.blocks,
        **tile.launch_options,
    )
    return y
