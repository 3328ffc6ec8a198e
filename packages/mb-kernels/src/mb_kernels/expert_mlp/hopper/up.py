"""The up-projection of tokens copied to their rows, on Hopper: ``expert_mlp.up``, ``hopper.core``.

Letters: N rows, D hidden, F ffn width, E experts.
"""

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
from mb_kernels.language.activation import activate, constexpr, up_factor
from mb_kernels.language.tiles import locate, pairs
from mb_kernels.runtime.descriptors import matrices, side_by_side
from mb_kernels.runtime.launch import cdiv
from mb_kernels.runtime.scales import Scales, pointers
from mb_kernels.targets.table import Tile


@gluon.jit
def _finished(z, rows, s, b, cols, F: gl.constexpr):
    """z times scales of rows and columns cols of s, plus those of b, rounded as z is.

    Without an s, or a b, as it is.
    """
    kind: gl.constexpr = z.dtype
    if s is not None:
        columns = gl.load(s + cols, mask=cols < F, other=0.0)
        z = z.to(gl.float32) * (rows[:, None] * columns)
    if b is not None:
        z = z.to(gl.float32) + gl.load(b + cols, mask=cols < F, other=0.0).to(gl.float32)
    return z.to(kind)


@gluon.jit
def _store_pairs(
    z, a, row, col, count, F: gl.constexpr, BLOCK_F: gl.constexpr, ACTIVATION: constexpr
):  # fmt: skip
    """The activations of z, gates and ups by turns, into a from ``row`` and ``col`` on."""
    HALF: gl.constexpr = z.shape[0]
    W: gl.constexpr = z.shape[1] // 2
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [128 // W, W // 4], [EPILOGUE_WARPS, 1], [1, 0])
    gate, up = pairs(z)
    value = activate(gate.to(gl.float32), ACTIVATION, True)
    value *= up_factor(up.to(gl.float32), ACTIVATION, True)
    r = row + gl.arange(0, HALF, gl.SliceLayout(1, BLOCK))[:, None]
    c = col + gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    mask = r < count if F % BLOCK_F == 0 else (r < count) & (c < F)
    gl.store(a + (r * F + c), gl.convert_layout(value.to(z.dtype), BLOCK), mask=mask)


@gluon.jit
def _finish_up(
    x_scales_ptr,
    w_scales_ptr,
    b_ptr,
    tiles_ptr,
    h_ptr,
    a_ptr,
    tile,
    full,
    drained,
    items,
    F: gl.constexpr,
    COLUMNS: gl.constexpr,
    ACTIVATION: constexpr,
    TRANSPOSED: gl.constexpr,
    SAVE_H: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    HALF: gl.constexpr = tile.shape[1] // 2
    W: gl.constexpr = tile.shape[2]
    GLU: gl.constexpr = ACTIVATION.gated
    COLUMNS_H: gl.constexpr = F * (GLU + 1)
    PARTS: gl.constexpr = 2 if ACTIVATION.gated and not ACTIVATION.interleaved else 1
    BLOCK_F: gl.constexpr = PIECES * W // (GLU + 1)
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [EPILOGUE_WARPS, 1], [1, 0])
    r = gl.arange(0, HALF, gl.SliceLayout(1, BLOCK))
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, row, row_end, column = locate(item, items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M)
        count = row_end - row
        h = h_ptr + row.to(gl.int64) * COLUMNS_H
        a = a_ptr + row.to(gl.int64) * F
        b_gate = b_ptr
        b_up = b_ptr
        if b_ptr is not None:
            b_gate += e.to(gl.int64) * COLUMNS_H
            b_up = b_gate + F
        s_gate = w_scales_ptr
        s_up = w_scales_ptr
        x_scales = x_scales_ptr
        if x_scales_ptr is not None:
            s_gate += e.to(gl.int64) * COLUMNS_H
            s_up = s_gate + F
            x_scales += row
        cols = column * (PIECES * W // PARTS) + c
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(PIECES // PARTS):
            # Where gate and up come side by side, a tile has 64 columns of each by turns.
            at_gate = 2 * i if TRANSPOSED and PARTS == 2 else i
            at_up = at_gate + 1 if TRANSPOSED else i + PIECES // 2
            for half in gl.static_range(2):
                if count > half * HALF:
                    at_1 = r + half * HALF
                    at = at_1[:, None]
                    live = at < count
                    width: gl.constexpr = COLUMNS_H // PARTS
                    mask = live if F % BLOCK_F == 0 else live & (cols < width)
                    z = tile.index(at_gate).slice(half * HALF, HALF).load(BLOCK)
                    if x_scales_ptr is not None:
                        rows = gl.load(x_scales + at_1, mask=at_1 < count, other=0.0)
                    else:
                        rows = None
                    z = _finished(z, rows, s_gate, b_gate, cols, width)
                    if SAVE_H:
                        gl.store(h + (at * COLUMNS_H + cols), z, mask=mask)
                    if ACTIVATION.interleaved:
                        col = (column * PIECES + i) * (W // 2)
                        _store_pairs(z, a, half * HALF, col, count, F, BLOCK_F, ACTIVATION)
                    else:
                        value = activate(z.to(gl.float32), ACTIVATION, True)
                        if GLU:
                            up = tile.index(at_up).slice(half * HALF, HALF).load(BLOCK)
                            up = _finished(up, rows, s_up, b_up, cols, F)
                            value *= up_factor(up.to(gl.float32), ACTIVATION, True)
                            if SAVE_H:
                                gl.store(h + F + (at * COLUMNS_H + cols), up, mask=mask)
                        gl.store(a + (at * F + cols), value.to(tile.dtype), mask=mask)
            cols += W
        mbarrier.arrive(drained)


@gluon.jit
def up_fwd_kernel(
    x,  # [N, D], tokens copied to their rows: ragged tensor descriptor
    w,  # [E, F, D], or for GLU [2E, F, D] or [E, 2F, D] interleaved; TRANSPOSED [E, D, F],
    # [E, 2, D, F], [E, D, 2F]: tensor descriptor
    x_scales_ptr,  # [N] fp32: of the rows of x in fp8; or None
    w_scales_ptr,  # like b_ptr, fp32: of the rows of w; or None
    b_ptr,  # [E, F], or [E, 2F] for GLU: added to the product; or None
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or [N, 2F] for GLU, with SAVE_H
    a_ptr,  # [N, F]
    D: gl.constexpr,
    F: gl.constexpr,
    ACTIVATION: constexpr,
    TRANSPOSED: gl.constexpr,
    SAVE_H: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = (F * (ACTIVATION.gated + 1) + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    items = gl.load(tiles_ptr + 3) * COLUMNS
    x_ring, w_ring, tile, ready, full, drained = shared(
        x, w, a_ptr.dtype.element_ty, BLOCK_M, BLOCK_N, STAGES
    )
    gl.warp_specialize(
        [
            (
                multiply,
                (x, w, tiles_ptr, x_ring, w_ring, tile, ready, full, drained, items,
                 STEPS, COLUMNS, not TRANSPOSED, GROUP_M),
            ),
            (
                _finish_up,
                (x_scales_ptr, w_scales_ptr, b_ptr, tiles_ptr, h_ptr, a_ptr, tile, full, drained,
                 items, F, COLUMNS, ACTIVATION, TRANSPOSED, SAVE_H, GROUP_M),
            ),
        ],
        [EPILOGUE_WARPS],
        [EPILOGUE_REGISTERS],
    )  # fmt: skip


def up(
    rows: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    tiles: Tensor,
    h: Tensor,
    a: Tensor,
    activation: Activation,
    *,
    transposed: bool,
    save_h: bool,
    tile: Tile,
    scales: Scales | None,
) -> None:
    """``expert_mlp.up.up`` of tokens copied to their rows, into h and a."""
    experts, hidden, ffn = w1.shape[0], rows.shape[1], a.shape[1]
    parts, columns = activation.parts, ffn * (2 if activation.gated else 1)
    if not transposed:
        block = (parts, tile.block_n // parts, tile.block_k)
        w = matrices(w1.view(experts * parts, columns // parts, hidden), block)
    elif parts == 1:
        w = matrices(w1, (1, tile.block_k, tile.block_n))
    else:
        w = side_by_side(w1, (1, 2, tile.block_k, tile.block_n // 2))
    run(
        up_fwd_kernel,
        rows,
        w,
        experts,
        cdiv(columns, tile.block_n),
        tile,
        *(*pointers(scales), b1, tiles, h, a),
        D=hidden,
        F=ffn,
        ACTIVATION=activation,
        TRANSPOSED=transposed,
        SAVE_H=save_h,
    )
