"""The backward of down-projection and activation, on Hopper: see ``_dact`` and ``_hopper``.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mb_kernels._activation import activate_with_derivative
from mb_kernels._hopper import (
    EPILOGUE_REGISTERS,
    EPILOGUE_WARPS,
    PIECES,
    constants,
    descriptor,
    gate_case,
    multiply,
    shared,
)
from mb_kernels._launch import launch, matrices, programs, ragged
from mb_kernels._schedule import locate
from mb_kernels.activation import base_function, is_glu
from mb_kernels.targets import TILES, GateCase, Target, Tile


@gluon.jit
def _load_h(h, at, cols, F: gl.constexpr, BLOCK_N: gl.constexpr):
    return gl.load(h + at) if F % BLOCK_N == 0 else gl.load(h + at, mask=cols < F, other=0.0)


@gluon.jit
def _finish_dact(
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
    GLU: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_M: gl.constexpr = tile.shape[1]
    W: gl.constexpr = tile.shape[2]
    BLOCK_N: gl.constexpr = PIECES * W
    PARTS: gl.constexpr = GLU + 1
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [EPILOGUE_WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, BLOCK))
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, row, row_end, column = locate(item, items // COLUMNS, tiles_ptr, COLUMNS, GROUP_M)
        live = r < row_end - row
        # Rows past the end read the last row's operands instead of a mask, which costs registers.
        near = gl.minimum(r, row_end - row - 1)
        slot = gl.load(order_ptr + row + near)
        s = gl.load(weights_ptr + slot).to(gl.float32)[:, None]
        h = h_ptr + row.to(gl.int64) * (PARTS * F)
        dh = dh_ptr + row.to(gl.int64) * (PARTS * F)
        a = a_ptr + row.to(gl.int64) * F
        cols = column * BLOCK_N + c
        at = near[:, None] * (PARTS * F) + cols
        # h is read two pieces ahead: one ahead, ptxas puts the load at the end of the piece before,
        # by the disassembly. Not yet timed.
        ahead = _load_h(h, at, cols, F, BLOCK_N)
        beyond = _load_h(h, at + W, cols + W, F, BLOCK_N)
        partial = gl.zeros((BLOCK_M,), gl.float32, gl.SliceLayout(1, BLOCK))
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(PIECES):
            z = ahead.to(gl.float32)
            ahead = beyond
            step = gl.where(i + 2 < PIECES, 2 * W, 0)
            beyond = _load_h(h, at + step, cols + step, F, BLOCK_N)
            q = tile.index(i).load(BLOCK).to(gl.float32)
            mask = live[:, None] if F % BLOCK_N == 0 else live[:, None] & (cols < F)
            to_h = r[:, None] * (PARTS * F) + cols
            value, slope = activate_with_derivative(z, ACTIVATION, True)
            if GLU:
                up = _load_h(h + F, at, cols, F, BLOCK_N).to(gl.float32)
                product = value * up
                partial += gl.sum(q * product, 1)
                q *= s
                gl.store(a + (r[:, None] * F + cols), (product * s).to(tile.dtype), mask=mask)
                gl.store(dh + F + to_h, (q * value).to(tile.dtype), mask=mask)
                slope *= up
            else:
                partial += gl.sum(q * value, 1)
                q *= s
                gl.store(a + (r[:, None] * F + cols), (value * s).to(tile.dtype), mask=mask)
            gl.store(dh + to_h, (q * slope).to(tile.dtype), mask=mask)
            at += W
            cols += W
        mbarrier.arrive(drained)
        gl.store(partials_ptr + column.to(gl.int64) * rows + row + r, partial, mask=live)


@gluon.jit
def dact_kernel(
    do,  # [N, D] in the order of rows: ragged tensor descriptor
    w,  # [E, D, F]: tensor descriptor
    order_ptr,  # [N] int32: slot of each row
    weights_ptr,  # [T, K]
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or [N, 2F] for GLU
    dh_ptr,  # like h
    a_ptr,  # [N, F], s * act(h)
    partials_ptr,  # [column tiles, N] fp32: <q, act(h)> per column tile
    rows,
    D: gl.constexpr,
    F: gl.constexpr,
    GLU: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    COLUMNS: gl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    items = gl.load(tiles_ptr + 3) * COLUMNS
    x_ring, w_ring, tile, ready, full, drained = shared(do, w, BLOCK_M, BLOCK_N, STAGES)
    gl.warp_specialize(
        [
            (
                multiply,
                (do, w, tiles_ptr, x_ring, w_ring, tile, ready, full, drained, items,
                 STEPS, COLUMNS, False, GROUP_M),
            ),
            (
                _finish_dact,
                (order_ptr, weights_ptr, tiles_ptr, h_ptr, dh_ptr, a_ptr, partials_ptr, rows,
                 tile, full, drained, items, F, COLUMNS, GLU, ACTIVATION, GROUP_M),
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
    activation: str,
    *,
    tile: Tile,
) -> None:
    """``_dact.dact`` into dh, a and partials."""
    _, hidden, ffn = w2.shape
    launch(
        dact_kernel,
        (programs(do),),
        descriptor(ragged(do, (tile.block_m, tile.block_k))),
        descriptor(matrices(w2, (1, tile.block_k, tile.block_n))),
        order,
        weights,
        tiles,
        h,
        dh,
        a,
        partials,
        order.shape[0],
        D=hidden,
        F=ffn,
        GLU=is_glu(activation),
        ACTIVATION=base_function(activation),
        **constants(tile),
    )


def gate_cases(target: Target) -> list[GateCase]:
    if target.name != "sm90":
        return []
    tile = TILES["dact_hopper"]["sm90"]
    return [
        gate_case(
            f"dact_{activation}",
            dact_kernel,
            "dact_hopper",
            pointers={
                "order_ptr": "*i32",
                "weights_ptr": "*fp32",
                "tiles_ptr": "*i32",
                "h_ptr": "*bf16",
                "dh_ptr": "*bf16",
                "a_ptr": "*bf16",
                "partials_ptr": "*fp32",
                "rows": "i32",
            },
            operands={
                "do": (1, 1, tile.block_m, tile.block_k),
                "w": (1, tile.block_k, tile.block_n),
            },
            constexprs={
                "D": 2048,
                "F": ffn,
                "GLU": is_glu(activation),
                "ACTIVATION": base_function(activation),
            },
        )
        for activation, ffn in (("swiglu", 1024), ("gelu", 3072), ("geglu", 720))
    ]
