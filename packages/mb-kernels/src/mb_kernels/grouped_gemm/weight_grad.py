"""Weight gradients: per expert ``a_e^T b_e``, contracted over that expert's ragged rows.

An empty expert contracts over one block of masked rows, which writes its zeros. Both operands are
rows: gathering by token inside this loop costs 20% of its speed, more than the copy beforehand.

Letters: N rows, P and Q columns of a and b, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.language.memory import load_ragged
from mb_kernels.language.tiles import first_item, halves, run_bounds, total_steps
from mb_kernels.runtime.descriptors import matrices, ragged
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets.table import Tile


@triton.jit
def _place(item, TILES_P: tl.constexpr, TILES_Q: tl.constexpr, GROUP_M: tl.constexpr):
    """(expert, row tile, column tile); GROUP_M row tiles go through all columns together."""
    width: tl.constexpr = GROUP_M * TILES_Q
    within = item % (TILES_P * TILES_Q)
    first = within // width * GROUP_M
    height = tl.minimum(TILES_P - first, GROUP_M)
    column = within % width // height
    return item // (TILES_P * TILES_Q), first + within % width % height, column


@triton.jit
def _rows_block(source, start, count, k0, col, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
                BLOCK_C: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_C] of rows start + k0.. of an expert with ``count`` rows; 0 past its end."""
    k = tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_C)
    base = source + (start + k0).to(tl.int64) * COLS + col
    inside = (k0 + k < count)[:, None] & (col + c < COLS)[None, :]
    return tl.load(base + k[:, None] * COLS + c[None, :], mask=inside, other=0.0)


@triton.jit
def _through_descriptors(
    a,
    b,
    offsets_ptr,
    out,
    E: tl.constexpr,
    TILES_P: tl.constexpr,
    TILES_Q: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The kernel on Hopper: the loads of the next tile run while the last one is stored."""
    PER_EXPERT: tl.constexpr = TILES_P * TILES_Q
    programs = tl.num_programs(0)
    total = total_steps(offsets_ptr, E * PER_EXPERT, PER_EXPERT, 1, BLOCK_K)
    loading = tl.program_id(0) - programs
    storing = tl.program_id(0)
    next_start, next_end = run_bounds(offsets_ptr, storing // PER_EXPERT, E)
    start = 0
    count = 0
    p = 0
    q = 0
    step = -1
    steps = 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, total):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            loading += programs
            _, row_tile, column_tile = _place(loading, TILES_P, TILES_Q, GROUP_M)
            p = row_tile * BLOCK_M
            q = column_tile * BLOCK_N
            start = next_start
            count = next_end - next_start
            # The tile after this one: its offsets arrive long before they are needed.
            next_start, next_end = run_bounds(offsets_ptr, (loading + programs) // PER_EXPERT, E)
            steps = tl.maximum(tl.cdiv(count, BLOCK_K), 1)
        a_block = load_ragged(a, start, count, step * BLOCK_K, p, BLOCK_K, BLOCK_M)
        b_block = load_ragged(b, start, count, step * BLOCK_K, q, BLOCK_K, BLOCK_N)
        acc = tl.dot(a_block.T, b_block, acc, input_precision=PRECISION)
        if step == steps - 1:
            e, row_tile, column_tile = _place(storing, TILES_P, TILES_Q, GROUP_M)
            p_out = row_tile * BLOCK_M
            q_out = column_tile * BLOCK_N
            left, right = halves(acc)
            left = tl.reshape(left.to(out.dtype), (1, BLOCK_M, BLOCK_N // 2))
            out.store([e, p_out, q_out], left)
            right = tl.reshape(right.to(out.dtype), (1, BLOCK_M, BLOCK_N // 2))
            out.store([e, p_out, q_out + BLOCK_N // 2], right)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            storing += programs


@triton.jit
def grouped_outer_kernel(
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
    if DESCRIPTORS:
        _through_descriptors(a, b, offsets_ptr, out, E, TILES_P, TILES_Q, PRECISION, BLOCK_M,
                             BLOCK_N, BLOCK_K, GROUP_M)  # fmt: skip
    else:
        items: tl.constexpr = E * TILES_P * TILES_Q
        for item in tl.range(first_item(XCDS, True), items, tl.num_programs(0), flatten=FLATTEN):
            e, row_tile, column_tile = _place(item, TILES_P, TILES_Q, GROUP_M)
            p = row_tile * BLOCK_M
            q = column_tile * BLOCK_N
            start = tl.load(offsets_ptr + e)
            count = tl.load(offsets_ptr + e + 1) - start
            tl.assume(start >= 0)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for step in range(0, tl.maximum(tl.cdiv(count, BLOCK_K), 1)):
                k0 = step * BLOCK_K
                a_block = _rows_block(a, start, count, k0, p, P, BLOCK_K, BLOCK_M)
                b_block = _rows_block(b, start, count, k0, q, Q, BLOCK_K, BLOCK_N)
                acc = tl.dot(a_block.T, b_block, acc, input_precision=PRECISION)

            rows = p + tl.arange(0, BLOCK_M)
            cols = q + tl.arange(0, BLOCK_N)
            base = out + tl.cast(e, tl.int64) * (P * Q)
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
    plan = plan_of(a)
    tile = tile or plan.tile("outer")
    operands = a, b, out
    if plan.descriptors:
        operands = (
            ragged(a, (tile.block_k, tile.block_m)),
            ragged(b, (tile.block_k, tile.block_n)),
            matrices(out, (1, tile.block_m, tile.block_n // 2)),
        )
    items = experts * cdiv(a.shape[1], tile.block_m) * cdiv(b.shape[1], tile.block_n)
    launch(
        grouped_outer_kernel,
        (plan.programs(items, tile),),
        *operands[:2],
        offsets,
        operands[2],
        E=experts,
        P=a.shape[1],
        Q=b.shape[1],
        DESCRIPTORS=plan.descriptors,
        PRECISION=plan.precision,
        XCDS=plan.xcds,
        **tile.blocks,
        **tile.launch_options,
    )
    return out
