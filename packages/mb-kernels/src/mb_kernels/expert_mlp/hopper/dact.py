"""The backward of down-projection and activation on Hopper: ``expert_mlp.dact``, ``hopper.core``.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mb_kernels.activation import Activation
from mb_kernels.expert_mlp.hopper.core import (
    EPILOGUE_REGISTERS,
    EPILOGUE_WARPS,
    PIECES,
    multiply,
    run,
    shared,
)
from mb_kernels.language.activation import (
    activate_with_derivative,
    constexpr,
    up_factor,
    up_gradient,
)
from mb_kernels.language.tiles import locate
from mb_kernels.runtime.descriptors import matrices
from mb_kernels.runtime.launch import cdiv
from mb_kernels.runtime.scales import Scales, pointers
from mb_kernels.targets.table import Tile


@gluon.jit
def _load_h(h, at, cols, F: gl.constexpr, BLOCK_N: gl.constexpr):
    return gl.load(h + at) if F % BLOCK_N == 0 else gl.load(h + at, mask=cols < F, other=0.0)


@gluon.jit
def _unpack(words, kind: gl.constexpr):
    """The two elements of ``kind`` in each 32-bit word, in fp32: gate and up where interleaved."""
    low = words.to(gl.int16).to(kind, bitcast=True)
    high = (words >> 16).to(gl.int16).to(kind, bitcast=True)
    return low.to(gl.float32), high.to(gl.float32)


@gluon.jit
def _pack(low, high, kind: gl.constexpr):
    low = low.to(kind).to(gl.int16, bitcast=True).to(gl.int32)
    return low & 0xFFFF | (high.to(kind).to(gl.int16, bitcast=True).to(gl.int32) << 16)


@gluon.jit
def _scaled(q, do_scales, w_scales, near, cols, F: gl.constexpr, BLOCK_N: gl.constexpr):
    """q in fp32, times the scales of its rows and columns if there are some."""
    q = q.to(gl.float32)
    if do_scales is not None:
        q *= gl.load(do_scales + near)[:, None]
        q *= _load_h(w_scales, cols, cols, F, BLOCK_N)
    return q


@gluon.jit
def _finish_piece(
    q, z, near, r, cols, s, do_scales, w_scales, count, h, dh, a,
    F: gl.constexpr, BLOCK_N: gl.constexpr, ACTIVATION: constexpr,
):  # fmt: skip
    """Rows r and columns cols of a tile into dh and a; their part of <q, act(h)>."""
    PARTS: gl.constexpr = 2 if ACTIVATION.gated and not ACTIVATION.interleaved else 1
    kind: gl.constexpr = q.dtype
    q = _scaled(q, do_scales, w_scales, near, cols, F, BLOCK_N)
    live = (r < count)[:, None]
    mask = live if F % BLOCK_N == 0 else live & (cols < F)
    to_h = r[:, None] * (PARTS * F) + cols
    to_a = a + (r[:, None] * F + cols)
    if ACTIVATION.interleaved:
        gate, up = _unpack(z, kind)
    else:
        gate = z.to(gl.float32)
    value, slope = activate_with_derivative(gate, ACTIVATION, True)
    if ACTIVATION.gated:
        if PARTS == 2:
            up = _load_h(h + F, near[:, None] * (2 * F) + cols, cols, F, BLOCK_N).to(gl.float32)
        factor = up_factor(up, ACTIVATION, True)
        partial = gl.sum(q * value * factor, 1)
        q *= s[:, None]
        d_up = up_gradient(q * value, up, factor, ACTIVATION)
        slope *= factor
        # In this order; in others clamped gates spill up to 120 bytes.
        if PARTS == 2:
            gl.store(dh + to_h, (q * slope).to(kind), mask=mask)
            gl.store(dh + F + to_h, d_up.to(kind), mask=mask)
        else:
            gl.store(dh + to_h, _pack(q * slope, d_up, kind), mask=mask)
        gl.store(to_a, (value * factor * s[:, None]).to(kind), mask=mask)
    else:
        partial = gl.sum(q * value, 1)
        q *= s[:, None]
        gl.store(to_a, (value * s[:, None]).to(kind), mask=mask)
        gl.store(dh + to_h, (q * slope).to(kind), mask=mask)
    return partial


@gluon.jit
def _finish_dact(
    do_scales_ptr,
    w_scales_ptr,
    order_ptr,
    weights_ptr,
    tiles_ptr,
    h_ptr,
    dh_ptr,
    a_ptr,
    partials_ptr,
    rows,
    tile,
    full,
    drained,
    items,
    F: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACTIVATION: constexpr,
    GROUP_M: gl.constexpr,
):
    HALF: gl.constexpr = tile.shape[1] // 2
    W: gl.constexpr = tile.shape[2]
    BLOCK_N: gl.constexpr = PIECES * W
    BARE: gl.constexpr = do_scales_ptr is None and not ACTIVATION.interleaved
    AHEAD: gl.constexpr = (2 - ACTIVATION.gated) if BARE else 0
    PARTS: gl.constexpr = 2 if ACTIVATION.gated and not ACTIVATION.interleaved else 1
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [EPILOGUE_WARPS, 1], [1, 0])
    top = gl.arange(0, HALF, gl.SliceLayout(1, BLOCK))
    bottom = top + HALF
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, row, row_end, column = locate(item, items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M)
        count = row_end - row
        # Rows past the end read the last row's operands instead of a mask, which costs registers.
        near_top = gl.minimum(top, count - 1)
        near_bottom = gl.minimum(bottom, count - 1)
        order = order_ptr + row
        s_top = gl.load(weights_ptr + gl.load(order + near_top)).to(gl.float32)
        s_bottom = gl.load(weights_ptr + gl.load(order + near_bottom)).to(gl.float32)
        h = h_ptr + row.to(gl.int64) * (PARTS * F)
        dh = dh_ptr + row.to(gl.int64) * (PARTS * F)
        a = a_ptr + row.to(gl.int64) * F
        do_scales = do_scales_ptr
        w_scales = w_scales_ptr
        if do_scales_ptr is not None:
            do_scales += row
            w_scales += e.to(gl.int64) * F
        cols = column * BLOCK_N + c
        partial_top = gl.zeros((HALF,), gl.float32, gl.SliceLayout(1, BLOCK))
        partial_bottom = gl.zeros((HALF,), gl.float32, gl.SliceLayout(1, BLOCK))
        # h is read one piece ahead, for want of registers of a GLU only the top, and of words of
        # gate and up, or with scales, none.
        z_top = _load_h(h, near_top[:, None] * (PARTS * F) + cols, cols, F, BLOCK_N)
        z_bottom = z_top
        if AHEAD == 2:
            z_bottom = _load_h(h, near_bottom[:, None] * F + cols, cols, F, BLOCK_N)
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(PIECES):
            piece = tile.index(i)
            after = cols + gl.where(i + 1 < PIECES, W, 0)
            if AHEAD == 0:
                z = _load_h(h, near_top[:, None] * (PARTS * F) + cols, cols, F, BLOCK_N)
            else:
                z = z_top
                z_top = _load_h(h, near_top[:, None] * (PARTS * F) + after, after, F, BLOCK_N)
            partial_top += _finish_piece(
                piece.slice(0, HALF).load(BLOCK), z, near_top, top, cols, s_top, do_scales,
                w_scales, count, h, dh, a, F, BLOCK_N, ACTIVATION,
            )  # fmt: skip
            if count > HALF:
                if AHEAD < 2:
                    z = _load_h(h, near_bottom[:, None] * (PARTS * F) + cols, cols, F, BLOCK_N)
                else:
                    z = z_bottom
                    z_bottom = _load_h(h, near_bottom[:, None] * F + after, after, F, BLOCK_N)
                partial_bottom += _finish_piece(
                    piece.slice(HALF, HALF).load(BLOCK), z, near_bottom, bottom, cols, s_bottom,
                    do_scales, w_scales, count, h, dh, a, F, BLOCK_N, ACTIVATION,
                )  # fmt: skip
            cols += W
        mbarrier.arrive(drained)
        partials = partials_ptr + column.to(gl.int64) * rows + row
        gl.store(partials + top, partial_top, mask=top < count)
        gl.store(partials + bottom, partial_bottom, mask=bottom < count)


@gluon.jit
def dact_bwd_kernel(
    do,  # [N, D] in the order of rows: ragged tensor descriptor
    w,  # [E, D, F], or TRANSPOSED [E, F, D]: tensor descriptor
    do_scales_ptr,  # [N] fp32: of the rows of do in fp8; or None
    w_scales_ptr,  # [E, F] fp32: of the columns of w; or None
    order_ptr,  # [N] int32: slot of each row
    weights_ptr,  # [T, K]
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or for GLU [N, 2F], interleaved in 32-bit words [N, F]
    dh_ptr,  # like h
    a_ptr,  # [N, F], s * act(h)
    partials_ptr,  # [column tiles, N] fp32: <q, act(h)> per column tile
    rows,
    D: gl.constexpr,
    F: gl.constexpr,
    ACTIVATION: constexpr,
    TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    items = gl.load(tiles_ptr + 3) * COLUMNS
    x_ring, w_ring, tile, ready, full, drained = shared(
        do, w, a_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, STAGES
    )
    gl.warp_specialize(
        [
            (
                multiply,
                (do, w, tiles_ptr, x_ring, w_ring, tile, ready, full, drained, items,
                 STEPS, COLUMNS, TRANSPOSED, GROUP_M),
            ),
            (
                _finish_dact,
                (do_scales_ptr, w_scales_ptr, order_ptr, weights_ptr, tiles_ptr, h_ptr, dh_ptr,
                 a_ptr, partials_ptr, rows, tile, full, drained, items, F, COLUMNS, ACTIVATION,
                 GROUP_M),
            ),
        ],
        [EPILOGUE_WARPS],
        [EPILOGUE_REGISTERS],
    )  # fmt: skip


def dact(
    do: Tensor,
    w2: Tensor,
    order: Tensor,
    weights: Tensor,
    tiles: Tensor,
    h: Tensor,
    dh: Tensor,
    a: Tensor,
    partials: Tensor,
    activation: Activation,
    *,
    transposed: bool,
    tile: Tile,
    scales: Scales | None,
) -> None:
    """``expert_mlp.dact.dact`` into dh, a and partials."""
    hidden, ffn = do.shape[1], a.shape[1]
    if activation.interleaved:
        h, dh = h.view(torch.int32), dh.view(torch.int32)
    block = (tile.block_n, tile.block_k) if transposed else (tile.block_k, tile.block_n)
    run(
        dact_bwd_kernel,
        do,
        matrices(w2, (1, *block)),
        w2.shape[0],
        cdiv(ffn, tile.block_n),
        tile,
        *(*pointers(scales), order, weights, tiles, h, dh, a, partials, order.shape[0]),
        D=hidden,
        F=ffn,
        ACTIVATION=activation,
        TRANSPOSED=transposed,
    )
