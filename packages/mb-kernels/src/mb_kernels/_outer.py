"""Weight gradients: per expert ``a_e^T b_e``, contracted over that expert's ragged rows.

One operand may be gathered by token on the way in; the next rows' tokens are fetched one step
ahead, because a dependent load inside the loop would halve the depth of the pipeline. An empty
expert contracts over one block of masked rows, which writes its zeros.

Letters: T tokens, N rows, P and Q columns of a and b, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged

from mb_kernels._launch import (
    launch,
    matrix_case,
    precision,
    programs,
    uses_descriptors,
    wide,
    xcds,
)
from mb_kernels._schedule import first_item, token_rows
from mb_kernels.targets import TILES, GateCase, Target, Tile


@triton.jit
def _rows_block(source, start, count, k0, col, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
                BLOCK_C: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_C] of contiguous rows start + k0.. of an expert with ``count`` rows."""
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
def _token_block(source, token, live, col, COLS: tl.constexpr, BLOCK_C: tl.constexpr,
                 WIDE: tl.constexpr):  # fmt: skip
    """[BLOCK_K, BLOCK_C] of the rows ``token`` of [T, COLS], zero where not ``live``."""
    c = tl.arange(0, BLOCK_C)
    base, offsets = token_rows(source, token, COLS, BLOCK_C, WIDE)
    mask = live[:, None] if COLS % BLOCK_C == 0 else live[:, None] & (col + c < COLS)[None, :]
    return tl.load(base + col + offsets, mask=mask, other=0.0)


@triton.jit
def outer_kernel(
    a,  # [N, P] (tensor descriptor or pointer), or [T, P] if gathered
    b,  # [N, Q] (tensor descriptor or pointer), or [T, Q] if gathered
    order_ptr,  # [N] int32: slot of each row, with GATHER
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [E, P, Q]
    E: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,  # "a", "b" or ""
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
    TILES_P: tl.constexpr = (P + BLOCK_M - 1) // BLOCK_M
    TILES_Q: tl.constexpr = (Q + BLOCK_N - 1) // BLOCK_N
    PER_EXPERT: tl.constexpr = TILES_P * TILES_Q
    WIDTH: tl.constexpr = GROUP_M * TILES_Q
    k = tl.arange(0, BLOCK_K)
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
        steps = tl.maximum(tl.cdiv(count, BLOCK_K), 1)
        if GATHER != "":
            token = tl.load(order_ptr + start + k, mask=k < count, other=0) // TOP_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            k0 = step * BLOCK_K
            if GATHER == "a":
                a_block = _token_block(a, token, k0 + k < count, p, P, BLOCK_M, WIDE)
            else:
                a_block = _rows_block(a, start, count, k0, p, P, BLOCK_K, BLOCK_M, DESCRIPTORS)
            if GATHER == "b":
                b_block = _token_block(b, token, k0 + k < count, q, Q, BLOCK_N, WIDE)
            else:
                b_block = _rows_block(b, start, count, k0, q, Q, BLOCK_K, BLOCK_N, DESCRIPTORS)
            if GATHER != "":
                ahead = k0 + BLOCK_K + k
                token = tl.load(order_ptr + start + ahead, mask=ahead < count, other=0) // TOP_K
            acc = tl.dot(a_block.T, b_block, acc, input_precision=PRECISION)

        rows = p + tl.arange(0, BLOCK_M)
        cols = q + tl.arange(0, BLOCK_N)
        base = out_ptr + e.to(tl.int64) * (P * Q)
        value = acc.to(out_ptr.dtype.element_ty)
        offsets = rows[:, None] * Q + cols[None, :]
        if P % BLOCK_M == 0 and Q % BLOCK_N == 0:
            tl.store(base + offsets, value)
        else:
            tl.store(base + offsets, value, mask=(rows < P)[:, None] & (cols < Q)[None, :])


def outer(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    tile: Tile,
    gather: str = "",
    order: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    """[E, P, Q] with a_e^T b_e over each expert's rows; ``gather`` names a by-token operand."""
    experts = offsets.shape[0] - 1
    out = a.new_empty((experts, a.shape[1], b.shape[1]))
    descriptors = uses_descriptors(a)
    a_arg, b_arg = a, b
    if descriptors and gather != "a":
        a_arg = create_ragged_descriptor(a, [tile.block_k, tile.block_m])
    if descriptors and gather != "b":
        b_arg = create_ragged_descriptor(b, [tile.block_k, tile.block_n])
    gathered = a if gather == "a" else b
    launch(
        outer_kernel,
        (programs(a, tile.programs_per_unit),),
        a_arg,
        b_arg,
        order,
        offsets,
        out,
        E=experts,
        P=a.shape[1],
        Q=b.shape[1],
        TOP_K=top_k,
        GATHER=gather,
        WIDE=wide(gathered, tile),
        DESCRIPTORS=descriptors,
        PRECISION=precision(a),
        XCDS=xcds(a),
        **tile.blocks,
        **tile.launch_options,
    )
    return out


def gate_cases(target: Target) -> list[GateCase]:
    tile = TILES["outer"][target.name]
    blocks = {"a": (1, 1, tile.block_k, tile.block_m), "b": (1, 1, tile.block_k, tile.block_n)}
    return [
        matrix_case(
            f"outer_gather_{gather or 'none'}_bf16",
            outer_kernel,
            target,
            "outer",
            pointers={
                "order_ptr": "*i32",
                "offsets_ptr": "*i32",
                "out_ptr": "*bf16",
                **({gather: "*bf16"} if gather else {}),
            },
            operands={name: block for name, block in blocks.items() if name != gather},
            constexprs={
                "E": 64,
                "P": 2048,
                "Q": 2048,
                "TOP_K": 8,
                "GATHER": gather,
                "WIDE": target.backend == "cuda" and tile.flatten,
            },
        )
        for gather in ("a", "b", "")
    ]
