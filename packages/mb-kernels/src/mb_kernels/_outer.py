"""Weight gradients: per expert ``a_e^T b_e``, contracted over that expert's ragged rows.

An empty expert contracts over one block of masked rows, which writes its zeros. Both operands are
rows: gathering by token inside this loop costs 20% of its speed, more than the copy beforehand.

Letters: N rows, P and Q columns of a and b, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import load_ragged

from mb_kernels._launch import (
    launch,
    matrices,
    matrix_case,
    precision,
    programs,
    ragged,
    tile_of,
    uses_descriptors,
    uses_hopper_kernels,
    xcds,
)
from mb_kernels._schedule import first_item, halves
from mb_kernels.targets import FEW_ROWS, TILES, GateCase, Target, Tile


@triton.jit
def _rows_block(source, start, count, k0, col, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
                BLOCK_C: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_C] of rows start + k0.. of an expert with ``count`` rows; 0 past its end."""
    if DESCRIPTORS:
        block = load_ragged(source, start, count, [k0, col])
    else:
        k = tl.arange(0, BLOCK_K)
        c = tl.arange(0, BLOCK_C)
        base = source + (start + k0).to(tl.int64) * COLS + col
        inside = (k0 + k < count)[:, None] & (col + c < COLS)[None, :]
        block = tl.load(base + k[:, None] * COLS + c[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def outer_kernel(
    a,  # [N, P]: tensor descriptor or pointer
    b,  # [N, Q]: tensor descriptor or pointer
    offsets_ptr,  # [E + 1] int32
    out,  # [E, P, Q]: tensor descriptor or pointer
    E: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    TILES_P: tl.constexpr = (P + BLOCK_M - 1) // BLOCK_M
    TILES_Q: tl.constexpr = (Q + BLOCK_N - 1) // BLOCK_N
    PER_EXPERT: tl.constexpr = TILES_P * TILES_Q
    WIDTH: tl.constexpr = GROUP_M * TILES_Q
    for item in tl.range(first_item(XCDS), E * PER_EXPERT, tl.num_programs(0), flatten=FLATTEN):
        e = item // PER_EXPERT
        within = item % PER_EXPERT
        first = within // WIDTH * GROUP_M
        height = tl.minimum(TILES_P - first, GROUP_M)
        p = (first + within % WIDTH % height) * BLOCK_M
        q = (within % WIDTH // height) * BLOCK_N
        start = tl.load(offsets_ptr + e)
        count = tl.load(offsets_ptr + e + 1) - start
        tl.assume(start >= 0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, tl.maximum(tl.cdiv(count, BLOCK_K), 1)):
            k0 = step * BLOCK_K
            a_block = _rows_block(a, start, count, k0, p, P, BLOCK_K, BLOCK_M, DESCRIPTORS)
            b_block = _rows_block(b, start, count, k0, q, Q, BLOCK_K, BLOCK_N, DESCRIPTORS)
            acc = tl.dot(a_block.T, b_block, acc, input_precision=PRECISION)

        if DESCRIPTORS:
            left, right = halves(acc)
            out.store([e, p, q], tl.reshape(left.to(out.dtype), (1, BLOCK_M, BLOCK_N // 2)))
            right = tl.reshape(right.to(out.dtype), (1, BLOCK_M, BLOCK_N // 2))
            out.store([e, p, q + BLOCK_N // 2], right)
        else:
            rows = p + tl.arange(0, BLOCK_M)
            cols = q + tl.arange(0, BLOCK_N)
            base = out + e.to(tl.int64) * (P * Q)
            value = acc.to(out.dtype.element_ty)
            offsets = rows[:, None] * Q + cols[None, :]
            if P % BLOCK_M == 0 and Q % BLOCK_N == 0:
                tl.store(base + offsets, value)
            else:
                tl.store(base + offsets, value, mask=(rows < P)[:, None] & (cols < Q)[None, :])


def outer(a: Tensor, b: Tensor, offsets: Tensor, tile: Tile | None = None) -> Tensor:
    """[E, P, Q] with a_e^T b_e over each expert's rows of a [N, P] and b [N, Q]."""
    experts = offsets.shape[0] - 1
    out = a.new_empty((experts, a.shape[1], b.shape[1]))
    few = a.shape[0] <= FEW_ROWS * experts
    if tile is None and few and uses_hopper_kernels(a):
        from mb_kernels import _hopper_outer

        _hopper_outer.outer(a, b, offsets, out, tile=tile_of("outer_few_rows_hopper", a))
        return out
    if tile is None:
        tile = tile_of("outer_few_rows" if few else "outer", a)
    operands = a, b, out
    if uses_descriptors(a):
        operands = (
            ragged(a, (tile.block_k, tile.block_m)),
            ragged(b, (tile.block_k, tile.block_n)),
            matrices(out, (1, tile.block_m, tile.block_n // 2)),
        )
    launch(
        outer_kernel,
        (programs(a, tile.programs_per_unit),),
        *operands[:2],
        offsets,
        operands[2],
        E=experts,
        P=a.shape[1],
        Q=b.shape[1],
        DESCRIPTORS=uses_descriptors(a),
        PRECISION=precision(a),
        XCDS=xcds(a),
        **tile.blocks,
        **tile.launch_options,
    )
    return out


def gate_cases(target: Target) -> list[GateCase]:
    cases = []
    for op in ("outer", "outer_few_rows"):
        tile = TILES[op][target.name]
        cases.append(
            matrix_case(
                f"{op}_bf16",
                outer_kernel,
                target,
                op,
                pointers={"offsets_ptr": "*i32"},
                operands={
                    "a": (1, 1, tile.block_k, tile.block_m),
                    "b": (1, 1, tile.block_k, tile.block_n),
                    "out": (1, tile.block_m, tile.block_n // 2),
                },
                constexprs={"E": 64, "P": 2048, "Q": 2048},
            )
        )
    return cases
