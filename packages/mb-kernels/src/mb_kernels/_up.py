"""The up-projection: gather tokens, multiply by w1, apply the activation, in one kernel.

Writes the pre-activations h (if the backward needs them) and the activations a. For a GLU one
accumulator holds the gate columns beside the up columns of the same output tile, so that the
activation needs no exchange between programs.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels._activation import activate
from mb_kernels._launch import (
    launch,
    matrices,
    matrix_case,
    precision,
    programs,
    uses_descriptors,
    wide,
    xcds,
)
from mb_kernels._schedule import (
    first_item,
    halves,
    load_rows,
    load_weight,
    locate,
    piece,
    token_rows,
)
from mb_kernels.activation import base_function, is_glu
from mb_kernels.targets import TILES, GateCase, Target, Tile


@triton.jit
def _store_piece(gate, up, h, a, r, col, m, F: tl.constexpr, BLOCK: tl.constexpr,
                 GLU: tl.constexpr, ACTIVATION: tl.constexpr, SAVE_H: tl.constexpr):  # fmt: skip
    """Write the columns of ``gate`` from ``col`` on: pre-activations, and activations.

    h and a point to the first row of the tile, so that offsets within it fit 32 bits.
    """
    W: tl.constexpr = gate.shape[1]
    cols = (col + tl.arange(0, W))[None, :]
    mask = m[:, None] if F % BLOCK == 0 else m[:, None] & (cols < F)
    kind = a.dtype.element_ty
    at = r[:, None] * ((GLU + 1) * F) + cols
    value = activate(gate, ACTIVATION)
    if SAVE_H:
        tl.store(h + at, gate.to(kind), mask=mask)
    if GLU:
        value *= up
        if SAVE_H:
            tl.store(h + F + at, up.to(kind), mask=mask)
    tl.store(a + r[:, None] * F + cols, value.to(kind), mask=mask)


@triton.jit
def up_kernel(
    x,  # [T, D] with GATHER; else rows [N, D], tensor descriptor or pointer
    w,  # [E, F, D], or [2E, F, D] for GLU: tensor descriptor or pointer
    order_ptr,  # [N] int32: slot of each row
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or [N, 2F] for GLU
    a_ptr,  # [N, F]
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVE_H: tl.constexpr,
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
    STACK: tl.constexpr = GLU + 1
    EVEN_D: tl.constexpr = D % BLOCK_K == 0
    total = tl.load(tiles_ptr + 3)
    items = total * COLUMNS
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for item in tl.range(first_item(XCDS), items, tl.num_programs(0), flatten=FLATTEN):
        e, row, row_end, column = locate(item, total, tiles_ptr, COLUMNS, GROUP_M)
        m = r < row_end - row
        tl.assume(e >= 0)
        if GATHER:
            token = tl.load(order_ptr + row + r, mask=m, other=0) // TOP_K
            source, offsets = token_rows(x, token, D, BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, STACK * BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            if GATHER:
                mask = m[:, None] if EVEN_D else m[:, None] & (start + k < D)[None, :]
                x_block = tl.load(source + start + offsets, mask=mask, other=0.0)
            else:
                x_block = load_rows(x, row, start, m, D, BLOCK_M, BLOCK_K, DESCRIPTORS)
            w_block = load_weight(
                w, e, column * BLOCK_N, start, F, D, BLOCK_N, BLOCK_K, STACK, DESCRIPTORS
            )
            acc = tl.dot(x_block, w_block.T, acc, input_precision=PRECISION)

        h = h_ptr + row.to(tl.int64) * (STACK * F)
        a = a_ptr + row.to(tl.int64) * F
        col = column * BLOCK_N
        if GLU:
            gate, up = halves(acc)
            _store_piece(gate, up, h, a, r, col, m, F, BLOCK_N, GLU, ACTIVATION, SAVE_H)
        else:
            # In one piece the exact GELU spills registers.
            for i in tl.static_range(4):
                q = piece(acc, i, 4)
                _store_piece(q, None, h, a, r, col, m, F, BLOCK_N, GLU, ACTIVATION, SAVE_H)
                col += BLOCK_N // 4


def up(
    x: Tensor,
    w1: Tensor,
    order: Tensor,
    tiles: Tensor,
    activation: str,
    *,
    top_k: int,
    save_h: bool,
    gather: bool = True,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """Pre-activations [N, F or 2F] (empty unless ``save_h``) and activations [N, F].

    x is [T, D], or without ``gather`` rows [N, D] in the order of ``order``.
    """
    experts, columns, hidden = w1.shape
    glu = is_glu(activation)
    ffn = columns // 2 if glu else columns
    rows = order.shape[0]
    h = x.new_empty((rows, columns) if save_h else (0,))
    a = x.new_empty((rows, ffn))
    descriptors = uses_descriptors(x)
    stack = 2 if glu else 1
    source, w = x, w1
    if descriptors and not gather:
        source = matrices(x, (tile.block_m, tile.block_k))
    if descriptors:
        block = (stack, tile.block_n, tile.block_k)
        w = matrices(w1.view(experts * stack, ffn, hidden), block)
    launch(
        up_kernel,
        (programs(x, tile.programs_per_unit),),
        source,
        w,
        order,
        tiles,
        h,
        a,
        D=hidden,
        F=ffn,
        TOP_K=top_k,
        GATHER=gather,
        GLU=glu,
        ACTIVATION=base_function(activation),
        SAVE_H=save_h,
        WIDE=wide(x, tile),
        DESCRIPTORS=descriptors,
        PRECISION=precision(x),
        XCDS=xcds(x),
        **tile.blocks,
        **tile.launch_options,
    )
    return h, a


def gate_cases(target: Target) -> list[GateCase]:
    cases = []
    for op, activation in (("up_glu", "swiglu"), ("up", "gelu")):
        glu = is_glu(activation)
        tile = TILES[op][target.name]
        cases.append(
            matrix_case(
                f"{op}_bf16",
                up_kernel,
                target,
                op,
                pointers={
                    "x": "*bf16",
                    "order_ptr": "*i32",
                    "tiles_ptr": "*i32",
                    "h_ptr": "*bf16",
                    "a_ptr": "*bf16",
                },
                operands={"w": (2 if glu else 1, tile.block_n, tile.block_k)},
                constexprs={
                    "D": 2048,
                    "F": 1024,
                    "TOP_K": 8,
                    "GATHER": True,
                    "GLU": glu,
                    "ACTIVATION": base_function(activation),
                    "SAVE_H": True,
                    "WIDE": target.backend == "cuda" and tile.flatten,
                },
            )
        )
    return cases
