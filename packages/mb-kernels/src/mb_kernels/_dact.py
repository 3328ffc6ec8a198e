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
from mb_kernels._schedule import (
    first_item,
    load_rows,
    load_weight,
    locate,
    piece,
    prefetch,
    token_rows,
)
from mb_kernels.activation import base_function, is_glu
from mb_kernels.targets import TILES, GateCase, Target, Tile


@triton.jit
def _piece(q, s, h, dh, a, r, col, m, F: tl.constexpr, BLOCK: tl.constexpr,
           GLU: tl.constexpr, ACTIVATION: tl.constexpr):  # fmt: skip
    """Finish the columns of q from ``col`` on; returns their part of <q, act(h)>.

    h, dh and a point to the first row of the tile, so that offsets within it fit 32 bits.
    """
    W: tl.constexpr = q.shape[1]
    cols = (col + tl.arange(0, W))[None, :]
    mask = m[:, None] if F % BLOCK == 0 else m[:, None] & (cols < F)
    kind = a.dtype.element_ty
    at = r[:, None] * ((GLU + 1) * F) + cols
    z = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate_with_derivative(z, ACTIVATION)
    da = q * s[:, None]
    if GLU:
        up = tl.load(h + F + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dh + at, (da * up * slope).to(kind), mask=mask)
        tl.store(dh + F + at, (da * value).to(kind), mask=mask)
        value *= up
    else:
        tl.store(dh + at, (da * slope).to(kind), mask=mask)
    tl.store(a + r[:, None] * F + cols, (value * s[:, None]).to(kind), mask=mask)
    return tl.sum(q * value, 1)


@triton.jit
def dact_kernel(
    do,  # [T, D] with GATHER; else rows [N, D], tensor descriptor or pointer
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
    GATHER: tl.constexpr,
    GLU: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PIECES: tl.constexpr,  # of the epilogue
    PREFETCH: tl.constexpr,  # bring h into L2 while the product runs
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
        h = h_ptr + row.to(tl.int64) * (STACK * F)
        if PREFETCH:
            # 64 elements of 2 bytes are a cache line; the loop below hides the trip to memory.
            lines = column * BLOCK_N + 64 * tl.arange(0, BLOCK_N // 64)
            last_row = tl.minimum(r, row_end - row - 1)
            at = last_row[:, None] * (STACK * F) + tl.minimum(lines, F - 1)[None, :]
            for part in tl.static_range(STACK):
                prefetch(h + part * F + at)
        if GATHER:
            token = tl.load(order_ptr + row + r, mask=m, other=0) // TOP_K
            source, offsets = token_rows(do, token, D, BLOCK_K, WIDE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, D, BLOCK_K):
            if GATHER:
                mask = m[:, None] if EVEN_D else m[:, None] & (start + k < D)[None, :]
                do_block = tl.load(source + start + offsets, mask=mask, other=0.0)
            else:
                do_block = load_rows(do, row, start, m, D, BLOCK_M, BLOCK_K, DESCRIPTORS)
            w_block = load_weight(
                w, e, start, column * BLOCK_N, D, F, BLOCK_K, BLOCK_N, 1, DESCRIPTORS
            )
            acc = tl.dot(do_block, w_block, acc, input_precision=PRECISION)

        slot = tl.load(order_ptr + row + r, mask=m, other=0)
        s = tl.load(weights_ptr + slot, mask=m, other=0.0).to(tl.float32)
        dh = dh_ptr + row.to(tl.int64) * (STACK * F)
        a = a_ptr + row.to(tl.int64) * F
        partial = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(PIECES):
            col = column * BLOCK_N + i * (BLOCK_N // PIECES)
            q = piece(acc, i, PIECES)
            partial += _piece(q, s, h, dh, a, r, col, m, F, BLOCK_N, GLU, ACTIVATION)
        tl.store(partials_ptr + column.to(tl.int64) * rows + row + r, partial, mask=m)


def _pieces(tile: Tile) -> int:
    """The fewest column pieces of the epilogue that spill no registers."""
    return 8 if tile.block_n == 256 else 4


def dact(
    do: Tensor,
    w2: Tensor,
    order: Tensor,
    weights: Tensor,
    tiles: Tensor,
    h: Tensor,
    activation: str,
    *,
    gather: bool = True,
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh like h; a' = s·act(h) [N, F]; partials [column tiles, N] fp32 of the weights' gradient.

    do is [T, D], or without ``gather`` rows [N, D] in the order of ``order``.
    """
    _, hidden, ffn = w2.shape
    rows = order.shape[0]
    dh = torch.empty_like(h)
    a = h.new_empty((rows, ffn))
    columns = triton.cdiv(ffn, tile.block_n)
    partials = h.new_empty((columns, rows), dtype=torch.float32)
    descriptors = uses_descriptors(do)
    source, w = do, w2
    if descriptors and not gather:
        source = matrices(do, (tile.block_m, tile.block_k))
    if descriptors:
        w = matrices(w2, (1, tile.block_k, tile.block_n))
    launch(
        dact_kernel,
        (programs(do, tile.programs_per_unit),),
        source,
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
        GATHER=gather,
        GLU=is_glu(activation),
        ACTIVATION=base_function(activation),
        PIECES=_pieces(tile),
        PREFETCH=do.is_cuda and torch.version.hip is None and do.dtype is not torch.float32,
        WIDE=wide(do, tile),
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
                "do": "*bf16",
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
                "GATHER": True,
                "PIECES": _pieces(tile),
                "PREFETCH": target.backend == "cuda",
                "GLU": is_glu(activation),
                "ACTIVATION": base_function(activation),
                "WIDE": target.backend == "cuda" and tile.flatten,
            },
        )
        for activation in ("swiglu", "gelu")
    ]
