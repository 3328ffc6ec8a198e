"""The up-projection: gather tokens, multiply by w1, add the bias, apply the activation.

Writes the pre-activations h (if the backward needs them) and the activations a. For a GLU one
accumulator holds the gate columns and the up columns of the same output tile, side by side or, if
they are ``interleaved``, alternating. So the activation needs no exchange between programs. Tokens
that were copied to their rows before (see ``steps``) are read as rows, on Hopper by ``hopper.up``.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.activation import Activation
from mb_kernels.bins import row_tiles
from mb_kernels.language.activation import activate, constexpr, up_factor
from mb_kernels.language.memory import (
    load_bias,
    load_transposed,
    load_weight,
    scaled,
    store_rows,
    token_rows,
)
from mb_kernels.language.tiles import first_item, halves, locate, pairs, piece
from mb_kernels.runtime.descriptors import matrices, ragged
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import plan_of
from mb_kernels.runtime.scales import Scales, pointers, result
from mb_kernels.targets.table import Tile


@triton.jit
def up_fwd_kernel(
    x_ptr,  # [T, D], or [N, D] in the order of rows without order_ptr
    w,  # [E, F, D], or for GLU [2E, F, D] or [E, 2F, D] interleaved: descriptor or pointer
    x_scales_ptr,  # [N] fp32: of the rows of x in fp8; or None
    w_scales_ptr,  # like b_ptr, fp32: of the rows of w; or None
    b_ptr,  # [E, F], or [E, 2F] for GLU: added to the product; or None
    order_ptr,  # [N] int32: slot of each row, or None
    tiles_ptr,  # from schedule()
    h,  # [N, 1, F], or for GLU [N, 2, F] or [N, 1, 2F], with SAVE_H: ragged descriptor or pointer
    a,  # [N, 1, F]: ragged tensor descriptor or pointer
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: constexpr,
    TRANSPOSED: tl.constexpr,  # w is [E, D, F] or [E, D, 2F]
    SAVE_H: tl.constexpr,
    PIECES: tl.constexpr,  # of the epilogue
    PTX: tl.constexpr,  # NVIDIA's fast exponential and reciprocal
    WIDE: tl.constexpr,  # see token_rows
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
    WIDTH: tl.constexpr = BLOCK_N * (ACTIVATION.gated + 1)
    BLOCK_W: tl.constexpr = WIDTH // PARTS
    ROWS_W: tl.constexpr = F * WIDTH // BLOCK_N // PARTS
    EVEN_D: tl.constexpr = D % BLOCK_K == 0
    total = tl.load(tiles_ptr + 3)
    items = total * COLUMNS
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for item in tl.range(first_item(XCDS, True), items, tl.num_programs(0), flatten=FLATTEN):
        e, row, row_end, column = locate(item, total, tiles_ptr, COLUMNS, GROUP_M)
        m = r < row_end - row
        tl.assume(e >= 0)
        if order_ptr is None:
            token = row + r
        else:
            token = tl.load(order_ptr + row + r, mask=m, other=0) // TOP_K
        source, offsets = token_rows(x_ptr, token, D, BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for start in range(0, D, BLOCK_K):
            mask = m[:, None] if EVEN_D else m[:, None] & (start + k < D)[None, :]
            x_block = tl.load(source + start + offsets, mask=mask, other=0.0)
            if TRANSPOSED:
                w_block = load_transposed(w, e, start, column * BLOCK_W, D, ROWS_W, BLOCK_K,
                                          BLOCK_W, PARTS, DESCRIPTORS and PARTS == 1)  # fmt: skip
            else:
                w_block = load_weight(w, e, column * BLOCK_W, start, ROWS_W, D, BLOCK_W, BLOCK_K,
                                      PARTS, DESCRIPTORS).T  # fmt: skip
            acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)

        rows = row_end - row
        col = column * BLOCK_N
        x_scales = None
        if x_scales_ptr is not None:
            x_scales = tl.load(x_scales_ptr + row + r, mask=m, other=0.0)
        if ACTIVATION.interleaved:
            for i in tl.static_range(2):
                z = piece(acc, i, 2)
                at = 2 * col + i * BLOCK_N
                z = scaled(z, x_scales, w_scales_ptr, e, 0, 1, at, 2 * F, WIDTH)
                if b_ptr is not None:
                    z += load_bias(b_ptr, e, 0, 1, at, 2 * F, WIDTH, BLOCK_N)
                if SAVE_H:
                    store_rows(h, z, 0, 1, row, rows, at, 2 * F, WIDTH, DESCRIPTORS)
                gate, up = pairs(z)
                value = activate(gate, ACTIVATION, PTX) * up_factor(up, ACTIVATION, PTX)
                store_rows(a, value, 0, 1, row, rows, at // 2, F, BLOCK_N, DESCRIPTORS)
        elif ACTIVATION.gated:
            gate, up = halves(acc)
            gate = scaled(gate, x_scales, w_scales_ptr, e, 0, 2, col, F, BLOCK_N)
            up = scaled(up, x_scales, w_scales_ptr, e, 1, 2, col, F, BLOCK_N)
            if b_ptr is not None:
                gate += load_bias(b_ptr, e, 0, 2, col, F, BLOCK_N, BLOCK_N)
                up += load_bias(b_ptr, e, 1, 2, col, F, BLOCK_N, BLOCK_N)
            if SAVE_H:
                store_rows(h, gate, 0, 2, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                store_rows(h, up, 1, 2, row, rows, col, F, BLOCK_N, DESCRIPTORS)
            value = activate(gate, ACTIVATION, PTX) * up_factor(up, ACTIVATION, PTX)
            store_rows(a, value, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
        else:
            for i in tl.static_range(PIECES):
                z = piece(acc, i, PIECES)
                z = scaled(z, x_scales, w_scales_ptr, e, 0, 1, col, F, BLOCK_N)
                if b_ptr is not None:
                    z += load_bias(b_ptr, e, 0, 1, col, F, BLOCK_N, BLOCK_N // PIECES)
                if SAVE_H:
                    store_rows(h, z, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                value = activate(z, ACTIVATION, PTX)
                store_rows(a, value, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                col += BLOCK_N // PIECES


def _pieces(activation: Activation) -> int:
    """Column pieces of the epilogue: the fewest that spill no registers."""
    return 1 if activation.parts == 2 else 2


def up(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    tiles: Tensor,
    activation: Activation,
    *,
    transposed: bool,
    order: Tensor | None,
    top_k: int,
    save_h: bool,
    tile: Tile,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """Pre-activations [N, F or 2F] (empty unless ``save_h``) and activations [N, F].

    x holds tokens [T, D] if there is an ``order``, else rows [N, D]; ``tile`` is the plan's. w1 is
    [E, D, F or 2F] if ``transposed``. With ``scales``, which want rows, x and w1 are codes.
    """
    experts, hidden = w1.shape[0], x.shape[1]
    columns = w1.shape[2 if transposed else 1]
    ffn = columns // 2 if activation.gated else columns
    rows = x.shape[0] if order is None else order.shape[0]
    dtype = result(x, scales)
    h = x.new_empty((rows, columns) if save_h else (0,), dtype=dtype)
    a = x.new_empty((rows, ffn), dtype=dtype)
    plan = plan_of(x)
    if order is None and plan.specialized:
        from mb_kernels.expert_mlp.hopper import up as hopper

        hopper.up(
            *(x, w1, b1, tiles, h, a, activation),
            transposed=transposed,
            save_h=save_h,
            tile=tile,
            scales=scales,
        )
        return h, a
    parts = activation.parts
    h_arg, a_arg, w = h, a, w1
    pieces = _pieces(activation)
    if plan.descriptors:
        width = tile.block_n // pieces
        h_width = tile.block_n if activation.interleaved else width
        h_arg = ragged(h, (tile.block_m, 1, h_width), parts=parts) if save_h else None
        a_arg = ragged(a, (tile.block_m, 1, width), parts=1)
        block_w = tile.block_n * (columns // ffn) // parts
        if not transposed:
            block = (parts, block_w, tile.block_k)
            w = matrices(w1.view(experts * parts, columns // parts, hidden), block)
        elif parts == 1:
            w = matrices(w1, (1, tile.block_k, block_w))
    items = row_tiles(rows, experts, tile.block_m) * cdiv(ffn, tile.block_n)
    launch(
        up_fwd_kernel,
        (plan.programs(items, tile),),
        x,
        w,
        *pointers(scales),
        b1,
        order,
        tiles,
        h_arg,
        a_arg,
        D=hidden,
        F=ffn,
        TOP_K=top_k,
        ACTIVATION=activation,
        TRANSPOSED=transposed,
        SAVE_H=save_h,
        PIECES=pieces,
        PTX=plan.ptx,
        WIDE=plan.wide(x, tile),
        DESCRIPTORS=plan.descriptors,
        PRECISION=plan.precision,
        XCDS=plan.xcds,
        **tile.blocks,
        **tile.launch_options,
    )
    return h, a
