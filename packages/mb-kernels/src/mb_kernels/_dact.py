"""The backward of down-projection and activation in one kernel, without the experts' outputs.

``q = do W2`` is the accumulator, with do gathered by token. The epilogue reads h, and writes
``dh = act'(h) · s q``, ``a' = s act(h)`` for the gradient of W2, and per column tile one partial of
the routing weight's gradient ``<q, act(h)>``; partials are summed later in a fixed order, so the
result is deterministic (idea: SonicMoE, arXiv:2512.14080). The epilogue works in column pieces:
in one piece it spills registers on every target.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels._activation import activate_with_derivative
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
from mb_kernels._schedule import first_item, halves, load_weight, locate, token_rows
from mb_kernels.activation import base_function, is_glu
from mb_kernels.targets import TILES, GateCase, Target, Tile


@triton.jit
def _piece(q, s, h_row, dh_row, a_row, col, m, F: tl.constexpr, W: tl.constexpr,
           GLU: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_F: tl.constexpr):  # fmt: skip
    """Finish W columns from ``col`` on; returns their part of <q, a>."""
    cols = (col + tl.arange(0, W))[None, :]
    mask = m[:, None] if EVEN_F else m[:, None] & (cols < F)
    kind = a_row.dtype.element_ty
    z = tl.load(h_row + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_with_derivative(z, ACTIVATION)
    da = q * s[:, None]
    if GLU:
        up = tl.load(h_row + F + cols, mask=mask, other=0.0).to(tl.float32)
        a = value * up
        tl.store(dh_row + cols, (da * up * slope).to(kind), mask=mask)
        tl.store(dh_row + F + cols, (da * value).to(kind), mask=mask)
    else:
        a = value
        tl.store(dh_row + cols, (da * slope).to(kind), mask=mask)
    tl.store(a_row + cols, (a * s[:, None]).to(kind), mask=mask)
    return tl.sum(q * a, 1)


@triton.jit
def dact_kernel(
    do_ptr,  # [T, D]
    w,  # [E, D, F]: tensor descriptor or pointer
    order_ptr,  # [N] int32: slot of each row
    weights_ptr,  # [T, K]
    tiles_ptr,  # from schedule()
    h_ptr,  # [N, F], or [N, 2F] for GLU
    dh_ptr,  # like h
    a_ptr,  # [N, F]: s * act(h)
    partials_ptr,  # [column tiles, N] fp32: <q, act(h)> per column tile
    rows,
    D: tl.constexpr,
    F: tl.constexpr,
    TOP_K: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    EVEN_F: tl.constexpr = F % BLOCK_N == 0
    total = tl.load(tiles_ptr + 3)
    items = total * COLUMNS
    r = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    for item in tl.range(first_item(XCDS), items, tl.num_programs(0), flatten=FLATTEN):
        e, row, row_end, column = locate(item, total, tiles_ptr, COLUMNS, GROUP_M)
        m = r < row_end - row
        tl.assume(e >= 0)
        slot = tl.load(order_ptr + row + r, mask=m, other=0)
        token = slot // TOP_K
        source, offsets = token_rows(do_ptr, token, D, BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            mask = m[:, None] if EVEN_D else m[:, None] & (start + k < D)[None, :]
            do = tl.load(source + start + offsets, mask=mask, other=0.0)
            w_block = load_weight(
                w, e, start, column * BLOCK_N, D, F, BLOCK_K, BLOCK_N, 1, DESCRIPTORS
            )
            acc = tl.dot(do, w_block, acc, input_precision=PRECISION)

        s = tl.load(weights_ptr + slot, mask=m, other=0.0).to(tl.float32)
        h_row = h_ptr + (row + r).to(tl.int64)[:, None] * (STACK * F)
        dh_row = dh_ptr + (row + r).to(tl.int64)[:, None] * (STACK * F)
        a_row = a_ptr + (row + r).to(tl.int64)[:, None] * F
        col = column * BLOCK_N
        W: tl.constexpr = BLOCK_N // 4
        left, right = halves(acc)
        q0, q1 = halves(left)
        q2, q3 = halves(right)
        partial = _piece(q0, s, h_row, dh_row, a_row, col, m, F, W, GLU, ACTIVATION, EVEN_F)
        partial += _piece(q1, s, h_row, dh_row, a_row, col + W, m, F, W, GLU, ACTIVATION, EVEN_F)
        partial += _piece(
            q2, s, h_row, dh_row, a_row, col + 2 * W, m, F, W, GLU, ACTIVATION, EVEN_F
        )
        partial += _piece(
            q3, s, h_row, dh_row, a_row, col + 3 * W, m, F, W, GLU, ACTIVATION, EVEN_F
        )
        tl.store(partials_ptr + column.to(tl.int64) * rows + row + r, partial, mask=m)


def dact(
    do: Tensor,
    w2: Tensor,
    order: Tensor,
    weights: Tensor,
    tiles: Tensor,
    h: Tensor,
    activation: str,
    *,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh like h; a' = s·act(h) [N, F]; partials [column tiles, N] fp32 of the weights' gradient."""
    _, hidden, ffn = w2.shape
    rows = order.shape[0]
    dh = torch.empty_like(h)
    a = h.new_empty((rows, ffn))
    columns = triton.cdiv(ffn, tile.block_n)
    partials = h.new_empty((columns, rows), dtype=torch.float32)
    descriptors = uses_descriptors(do)
    w = matrices(w2, (1, tile.block_k, tile.block_n)) if descriptors else w2
    launch(
        dact_kernel,
        (programs(do, tile.programs_per_unit),),
        do,
        w,
        order,
        weights,
        tiles,
        h,
        dh,
        a,
        partials,
        rows,
        D=hidden,
        F=ffn,
        TOP_K=weights.shape[1],
        GLU=is_glu(activation),
        ACTIVATION=base_function(activation),
        WIDE=wide(do),
        DESCRIPTORS=descriptors,
        PRECISION=precision(do),
        XCDS=xcds(do),
        **tile.blocks,
        **tile.launch_options,
    )
    return dh, a, partials


def gate_cases(target: Target) -> list[GateCase]:
    tile = TILES["dact"][target.name]
    return [
        matrix_case(
            f"dact_{activation}_bf16",
            dact_kernel,
            target,
            "dact",
            pointers={
                "do_ptr": "*bf16",
                "order_ptr": "*i32",
                "weights_ptr": "*fp32",
                "tiles_ptr": "*i32",
                "h_ptr": "*bf16",
                "dh_ptr": "*bf16",
                "a_ptr": "*bf16",
                "partials_ptr": "*fp32",
            },
            operands={"w": (1, tile.block_k, tile.block_n)},
            integers=("rows",),
            constexprs={
                "D": 2048,
                "F": 1024,
                "TOP_K": 8,
                "GLU": is_glu(activation),
                "ACTIVATION": base_function(activation),
                "WIDE": target.backend == "cuda",
            },
        )
        for activation in ("swiglu", "gelu")
    ]
