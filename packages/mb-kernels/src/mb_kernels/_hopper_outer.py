"""Weight gradients over few rows per expert, on Hopper: see ``_outer`` and ``_hopper``.

Letters: N rows, P and Q columns of a and b, E experts.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
from mb_kernels._launch import launch, programs, ragged
from mb_kernels.targets import TILES, GateCase, Target, Tile

_BILLION = gl.constexpr(0x40000000)  # of ragged descriptors, see triton.tools.ragged_tma


@gluon.jit
def _place(item, TILES_P: gl.constexpr, TILES_Q: gl.constexpr, GROUP_M: gl.constexpr):
    """(expert, row tile, column tile) of an item; GROUP_M row tiles go through all columns."""
    within = item % (TILES_P * TILES_Q)
    first = within // (GROUP_M * TILES_Q) * GROUP_M
    height = gl.minimum(TILES_P - first, GROUP_M)
    within = within % (GROUP_M * TILES_Q)
    return item // (TILES_P * TILES_Q), first + within % height, within // height


@gluon.jit
def _locate_ragged(item, items, offsets_ptr, BLOCK_K: gl.constexpr, TILES_P: gl.constexpr,
                   TILES_Q: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    e, p, q = _place(item, TILES_P, TILES_Q, GROUP_M)
    end = gl.load(offsets_ptr + e + 1)
    count = end - gl.load(offsets_ptr + e)
    # An expert without rows takes one step over rows that read as zeros, and so writes its zeros.
    return gl.maximum(gl.cdiv(count, BLOCK_K), 1), p, q, end, count


@gluon.jit
def _copy_ragged(a, b, a_block, b_block, barrier, k, p, q, end, count):
    # The coordinates of triton.tools.ragged_tma.load_ragged: zeros past the expert's last row.
    k += _BILLION - count
    at = [_BILLION, end, k, p * a.block_shape[3]]
    tma.async_copy_global_to_shared(a, at, barrier, a_block)
    at = [_BILLION, end, k, q * b.block_shape[3]]
    tma.async_copy_global_to_shared(b, at, barrier, b_block)


@gluon.jit
def _finish_outer(
    out_ptr,
    tile,
    full,
    drained,
    items,
    P: gl.constexpr,
    Q: gl.constexpr,
    TILES_P: gl.constexpr,
    TILES_Q: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    BLOCK_M: gl.constexpr = tile.shape[1]
    W: gl.constexpr = tile.shape[2]
    BLOCK_N: gl.constexpr = PIECES * W
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [EPILOGUE_WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, BLOCK))[:, None]
    c = gl.arange(0, W, gl.SliceLayout(0, BLOCK))[None, :]
    parity = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        e, p, q = _place(item, TILES_P, TILES_Q, GROUP_M)
        out = out_ptr + e.to(gl.int64) * (P * Q) + p.to(gl.int64) * (BLOCK_M * Q)
        cols = q * BLOCK_N + c
        mbarrier.wait(full, parity)
        parity ^= 1
        for i in range(PIECES):
            block = tile.index(i).load(BLOCK)
            if P % BLOCK_M == 0 and Q % BLOCK_N == 0:
                gl.store(out + (r * Q + cols), block)
            else:
                mask = (p * BLOCK_M + r < P) & (cols < Q)
                gl.store(out + (r * Q + cols), block, mask=mask)
            cols += W
        mbarrier.arrive(drained)


@gluon.jit
def outer_kernel(
    a,  # [N, P]: ragged tensor descriptor
    b,  # [N, Q]: ragged tensor descriptor
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, P, Q]
    E: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    TILES_P: gl.constexpr = (P + BLOCK_M - 1) // BLOCK_M
    TILES_Q: gl.constexpr = (Q + BLOCK_N - 1) // BLOCK_N
    items = E * TILES_P * TILES_Q
    a_ring, b_ring, tile, ready, full, drained = shared(a, b, BLOCK_M, BLOCK_N, STAGES)
    gl.warp_specialize(
        [
            (
                multiply,
                (a, b, offsets_ptr, a_ring, b_ring, tile, ready, full, drained, items,
                 _locate_ragged, _copy_ragged, True, False, BLOCK_K, BLOCK_K,
                 TILES_P, TILES_Q, GROUP_M),
            ),
            (
                _finish_outer,
                (out_ptr, tile, full, drained, items, P, Q, TILES_P, TILES_Q, GROUP_M),
            ),
        ],
        [EPILOGUE_WARPS],
        [EPILOGUE_REGISTERS],
    )  # fmt: skip


def outer(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, tile: Tile) -> None:
    """``_outer.outer`` into out."""
    launch(
        outer_kernel,
        (programs(a),),
        descriptor(ragged(a, (tile.block_k, tile.block_m))),
        descriptor(ragged(b, (tile.block_k, tile.block_n))),
        offsets,
        out,
        E=out.shape[0],
        P=out.shape[1],
        Q=out.shape[2],
        **constants(tile),
    )


def gate_cases(target: Target) -> list[GateCase]:
    if target.name != "sm90":
        return []
    tile = TILES["outer_few_rows_hopper"]["sm90"]
    return [
        gate_case(
            "outer_few_rows",
            outer_kernel,
            "outer_few_rows_hopper",
            pointers={"offsets_ptr": "*i32", "out_ptr": "*bf16"},
            operands={
                "a": (1, 1, tile.block_k, tile.block_m),
                "b": (1, 1, tile.block_k, tile.block_n),
            },
            constants={"E": 64, "P": 768, "Q": 3072},
        )
    ]
