"""The backward of down-projection and activation in one kernel, without the experts' outputs.

``q = do W2`` is the accumulator. The epilogue reads h, and writes ``dh = act'(h) · s q``,
``a' = s act(h)`` for the gradient of W2, and for each column tile a part of the routing weight's
gradient ``<q, act(h)>``. The parts are summed later in a fixed order, so the result is
deterministic (idea: SonicMoE, arXiv:2512.14080). The epilogue works on pieces of columns: on whole
tiles it spills registers on every target.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.activation import Activation
from mb_kernels.bins import row_tiles
from mb_kernels.language.activation import (
    activate_with_derivative,
    constexpr,
    up_factor,
    up_gradient,
)
from mb_kernels.language.memory import scaled, store_rows
from mb_kernels.language.tiles import first_item, locate, multiply_rows, pairs, piece
from mb_kernels.runtime.descriptors import matrices, ragged
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import plan_of
from mb_kernels.runtime.scales import Scales, pointers
from mb_kernels.targets.table import Tile


def _pieces(activation: Activation, block_n: int) -> int:
    """Column pieces of the epilogue: fewer spill registers, more are slower.

    2.30 to 2.65 ms for 4 to 8 (OLMoE). With a limit, or gates and ups by turns, 4 spill 230 bytes.
    """
    crowded = activation.interleaved or activation.limit < math.inf
    return 8 if crowded and block_n >= 128 else 4


@triton.jit
def _load_h(h, part: tl.constexpr, parts: tl.constexpr, row, r, col, F: tl.constexpr,
            BLOCK: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """[BLOCK_M, W] at rows row + r and columns col.. of part ``part`` of h [N, parts, F], fp32."""
    cols = (col + tl.arange(0, W))[None, :]
    at = h + row.to(tl.int64) * (parts * F) + part * F + (r[:, None] * (parts * F) + cols)
    block = tl.load(at) if F % BLOCK == 0 else tl.load(at, mask=cols < F, other=0.0)
    return block.to(tl.float32)


@triton.jit
def dact_bwd_kernel(
    do,  # [N, D] in the order of rows: ragged tensor descriptor or pointer
    w,  # [E, D, F], or see TRANSPOSED: tensor descriptor or pointer
    do_scales_ptr,  # [N] fp32: of the rows of do in fp8; or None
    w_scales_ptr,  # [E, F] fp32: of the columns of w; or None
    order_ptr,  # [N] int32: slot of each row
    weights_ptr,  # [T, K]
    tiles_ptr,  # from schedule()
    h,  # [N, 1, F], or for GLU [N, 2, F], [N, 1, 2F] interleaved
    dh,  # like h: ragged tensor descriptor or pointer
    a,  # [N, 1, F], s * act(h): ragged tensor descriptor or pointer
    partials_ptr,  # [column tiles, N] fp32: <q, act(h)> per column tile
    rows,
    D: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: constexpr,
    TRANSPOSED: tl.constexpr,  # w is [E, F, D]
    PIECES: tl.constexpr,  # of the epilogue
    PTX: tl.constexpr,  # NVIDIA's fast exponential and reciprocal
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    COLUMNS: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = (  # ty: ignore[invalid-assignment]
        2 if ACTIVATION.gated and not ACTIVATION.interleaved else 1
    )
    W: tl.constexpr = BLOCK_N // PIECES
    total = tl.load(tiles_ptr + 3)
    items = total * COLUMNS
    r = tl.arange(0, BLOCK_M)
    for item in tl.range(first_item(XCDS, True), items, tl.num_programs(0), flatten=FLATTEN):
        e, row, row_end, column = locate(item, total, tiles_ptr, COLUMNS, GROUP_M)
        count = row_end - row
        m = r < count
        tl.assume(e >= 0)
        acc = multiply_rows(do, w, e, row, count, column * BLOCK_N, D, F, TRANSPOSED, DESCRIPTORS,
                            PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        slot = tl.load(order_ptr + row + r, mask=m, other=0)
        s = tl.load(weights_ptr + slot, mask=m, other=0.0).to(tl.float32)[:, None]
        # Rows past the end read the last row's h instead of a mask, which costs registers.
        clamped = tl.minimum(r, count - 1)
        do_scales = None
        if do_scales_ptr is not None:
            do_scales = tl.load(do_scales_ptr + row + r, mask=m, other=0.0)
        partial = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(PIECES):
            col = column * BLOCK_N + i * W
            q = piece(acc, i, PIECES)
            q = scaled(q, do_scales, w_scales_ptr, e, 0, 1, col, F, BLOCK_N)
            if ACTIVATION.interleaved:
                both = _load_h(h, 0, 1, row, clamped, 2 * col, 2 * F, 2 * BLOCK_N, 2 * W)
                z, up = pairs(both)
            else:
                z = _load_h(h, 0, PARTS, row, clamped, col, F, BLOCK_N, W)
            value, slope = activate_with_derivative(z, ACTIVATION, PTX)
            if ACTIVATION.gated:
                if PARTS == 2:
                    up = _load_h(h, 1, PARTS, row, clamped, col, F, BLOCK_N, W)
                factor = up_factor(up, ACTIVATION, PTX)
                partial += tl.sum(q * (value * factor), 1)
                q *= s
                store_rows(a, value * factor * s, 0, 1, row, count, col, F, BLOCK_N, DESCRIPTORS)
                d_up = up_gradient(q * value, up, factor, ACTIVATION)
                if PARTS == 2:
                    store_rows(dh, d_up, 1, PARTS, row, count, col, F, BLOCK_N, DESCRIPTORS)
                slope *= factor
            else:
                partial += tl.sum(q * value, 1)
                q *= s
                store_rows(a, value * s, 0, 1, row, count, col, F, BLOCK_N, DESCRIPTORS)
            if ACTIVATION.interleaved:
                both = tl.interleave(q * slope, d_up)
                store_rows(dh, both, 0, 1, row, count, 2 * col, 2 * F, 2 * BLOCK_N, DESCRIPTORS)
            else:
                store_rows(dh, q * slope, 0, PARTS, row, count, col, F, BLOCK_N, DESCRIPTORS)
        tl.store(partials_ptr + column.to(tl.int64) * rows + row + r, partial, mask=m)


def dact(
    do: Tensor,
    w2: Tensor,
    order: Tensor,
    weights: Tensor,
    tiles: Tensor,
    h: Tensor,
    activation: Activation,
    *,
    transposed: bool,
    tile: Tile,
    scales: Scales | None = None,
    more_partials: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh like h; a' = s·act(h) [N, F]; partials [column tiles, N] fp32 of the weights' gradient.

    do is [N, D] in the order of rows, w2 [E, F, D] if ``transposed``; both are codes if there are
    ``scales``. The last ``more_partials`` partials are left to the caller.
    """
    hidden, ffn = do.shape[1], w2.shape[1 if transposed else 2]
    rows = order.shape[0]
    dh = torch.empty_like(h)
    a = h.new_empty((rows, ffn))
    columns = cdiv(ffn, tile.block_n)
    partials = h.new_empty((columns + more_partials, rows), dtype=torch.float32)
    plan = plan_of(do)
    if plan.specialized:
        from mb_kernels.expert_mlp.hopper import dact as hopper

        hopper.dact(
            *(do, w2, order, weights, tiles, h, dh, a, partials, activation),
            transposed=transposed,
            tile=tile,
            scales=scales,
        )
        return dh, a, partials
    pieces = _pieces(activation, tile.block_n)
    operands = do, w2, h, dh, a
    if plan.descriptors:
        width = tile.block_n // pieces
        dh_width = 2 * width if activation.interleaved else width
        block = (tile.block_n, tile.block_k) if transposed else (tile.block_k, tile.block_n)
        operands = (
            ragged(do, (tile.block_m, tile.block_k)),
            matrices(w2, (1, *block)),
            h,
            ragged(dh, (tile.block_m, 1, dh_width), parts=activation.parts),
            ragged(a, (tile.block_m, 1, width), parts=1),
        )
    items = row_tiles(rows, w2.shape[0], tile.block_m) * columns
    launch(
        dact_bwd_kernel,
        (plan.programs(items, tile),),
        *operands[:2],
        *pointers(scales),
        order,
        weights,
        tiles,
        *operands[2:],
        partials,
        rows,
        D=hidden,
        F=ffn,
        ACTIVATION=activation,
        TRANSPOSED=transposed,
        PIECES=pieces,
        PTX=plan.ptx,
        DESCRIPTORS=plan.descriptors,
        PRECISION=plan.precision,
        XCDS=plan.xcds,
        **tile.blocks,
        **tile.launch_options,
    )
    return dh, a, partials
