"""The up-projection: gather tokens, multiply by w1, apply the activation, in one kernel.

Writes the pre-activations h (if the backward needs them) and the activations a. For a GLU one
accumulator holds the gate columns beside the up columns of the same output tile, so that the
activation needs no exchange between programs. Tokens that were copied to their rows beforehand (see
``steps``) are read as they lie, on Hopper by ``hopper.up``.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.activation import base_function, is_glu
from mb_kernels.language.activation import activate
from mb_kernels.language.memory import load_weight, store_rows, token_rows
from mb_kernels.language.tiles import first_item, halves, locate, piece
from mb_kernels.runtime.launch import (
    launch,
    matrices,
    matrix_case,
    precision,
    programs,
    ptx,
    ragged,
    tile_of,
    uses_descriptors,
    uses_hopper_kernels,
    wide,
    xcds,
)
from mb_kernels.targets.table import TILES, GateCase, Target, Tile


@triton.jit
def up_kernel(
    x_ptr,  # [T, D], or [N, D] in the order of rows without order_ptr
    w,  # [E, F, D], or [2E, F, D] for GLU: tensor descriptor or pointer
    order_ptr,  # [N] int32: slot of each row, or None
    tiles_ptr,  # from schedule()
    h,  # [N, 1, F], or [N, 2, F] for GLU, with SAVE_H: ragged tensor descriptor or pointer
    a,  # [N, 1, F]: ragged tensor descriptor or pointer
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
        if order_ptr is None:
            token = row + r
        else:
            token = tl.load(order_ptr + row + r, mask=m, other=0) // TOP_K
        source, offsets = token_rows(x_ptr, token, D, BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, STACK * BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            mask = m[:, None] if EVEN_D else m[:, None] & (start + k < D)[None, :]
            x_block = tl.load(source + start + offsets, mask=mask, other=0.0)
            w_block = load_weight(
                w, e, column * BLOCK_N, start, F, D, BLOCK_N, BLOCK_K, STACK, DESCRIPTORS
            )
            acc = tl.dot(x_block, w_block.T, acc, input_precision=PRECISION)

        rows = row_end - row
        col = column * BLOCK_N
        if GLU:
            gate, up = halves(acc)
            if SAVE_H:
                store_rows(h, gate, 0, 2, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                store_rows(h, up, 1, 2, row, rows, col, F, BLOCK_N, DESCRIPTORS)
            value = activate(gate, ACTIVATION, PTX) * up
            store_rows(a, value, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
        else:
            for i in tl.static_range(PIECES):
                z = piece(acc, i, PIECES)
                if SAVE_H:
                    store_rows(h, z, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                value = activate(z, ACTIVATION, PTX)
                store_rows(a, value, 0, 1, row, rows, col, F, BLOCK_N, DESCRIPTORS)
                col += BLOCK_N // PIECES


def _pieces(activation: str) -> int:
    """Column pieces of the epilogue: the fewest that spill no registers."""
    return 1 if is_glu(activation) else 2


def up_tile(x: Tensor, activation: str, *, in_rows: bool) -> Tile:
    """The tile of ``up`` for the device and dtype of ``x``, tokens or tokens copied to rows."""
    if in_rows and uses_hopper_kernels(x):
        return tile_of("up_hopper", x)
    return tile_of("up_glu" if is_glu(activation) else "up", x)


def up(
    x: Tensor,
    w1: Tensor,
    tiles: Tensor,
    activation: str,
    *,
    order: Tensor | None,
    top_k: int,
    save_h: bool,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """Pre-activations [N, F or 2F] (empty unless ``save_h``) and activations [N, F].

    x holds tokens [T, D] if there is an ``order``, else rows [N, D]; ``tile`` is ``up_tile``'s.
    """
    experts, columns, hidden = w1.shape
    glu = is_glu(activation)
    ffn = columns // 2 if glu else columns
    rows = x.shape[0] if order is None else order.shape[0]
    h = x.new_empty((rows, columns) if save_h else (0,))
    a = x.new_empty((rows, ffn))
    if order is None and uses_hopper_kernels(x):
        from mb_kernels.expert_mlp.hopper import up as hopper

        hopper.up(x, w1, tiles, h, a, activation, save_h=save_h, tile=tile)
        return h, a
    descriptors = uses_descriptors(x)
    stack = 2 if glu else 1
    h_arg, a_arg, w = h, a, w1
    pieces = _pieces(activation)
    if descriptors:
        out = (tile.block_m, 1, tile.block_n // pieces)
        h_arg = ragged(h, out, parts=stack) if save_h else None
        a_arg = ragged(a, out, parts=1)
        block = (stack, tile.block_n, tile.block_k)
        w = matrices(w1.view(experts * stack, ffn, hidden), block)
    launch(
        up_kernel,
        (programs(x, tile.programs_per_unit),),
        x,
        w,
        order,
        tiles,
        h_arg,
        a_arg,
        D=hidden,
        F=ffn,
        TOP_K=top_k,
        GLU=glu,
        ACTIVATION=base_function(activation),
        SAVE_H=save_h,
        PIECES=pieces,
        PTX=ptx(x),
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
    for op, activation, in_rows in (
        ("up_glu", "swiglu", False),
        ("up", "gelu", False),
        ("up_glu", "swiglu", True),
        ("up", "gelu", True),
    ):
        glu = is_glu(activation)
        tile = TILES[op][target.name]
        out = (tile.block_m, 1, tile.block_n // _pieces(activation))
        cases.append(
            matrix_case(
                f"{op}{'_rows' if in_rows else ''}_bf16",
                up_kernel,
                target,
                op,
                pointers={
                    "x_ptr": "*bf16",
                    **({} if in_rows else {"order_ptr": "*i32"}),
                    "tiles_ptr": "*i32",
                },
                operands={
                    "w": (2 if glu else 1, tile.block_n, tile.block_k),
                    "h": (1, 1, *out),
                    "a": (1, 1, *out),
                },
                constexprs={
                    **({"order_ptr": None} if in_rows else {}),
                    "D": 2048,
                    "F": 1024,
                    "TOP_K": 1 if in_rows else 8,
                    "GLU": glu,
                    "ACTIVATION": base_function(activation),
                    "SAVE_H": True,
                    "PIECES": _pieces(activation),
                    "PTX": target.backend == "cuda",
                    "WIDE": target.backend == "cuda" and tile.flatten,
                },
            )
        )
    return cases
