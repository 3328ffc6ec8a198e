"""Kernel of ``mb_kernels.symmetric_matmul``.

Persistent over the tiles on and below the diagonal. Those below are stored twice, as they are and
mirrored; of those on it each number is stored once, or two would race for its place.

Letters: B matrices, M rows, K columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.language.memory import load_weight
from mb_kernels.language.tiles import first_item, piece
from mb_kernels.runtime.descriptors import matrices, operand
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import Plan, plan_of
from mb_kernels.symmetric_matmul import reference

# In which a tile's columns are stored: with 2 a program takes 131 KB of an H200's shared memory,
# with 4 115 KB, which an SM has twice.
_PIECES = 4


@triton.jit
def _place(item, TILES: tl.constexpr):
    """(matrix, row tile, column tile) of an item, the column tile at most the row tile."""
    PER_MATRIX: tl.constexpr = TILES * (TILES + 1) // 2
    item = tl.cast(item, tl.int32)  # to the interpreter it is a plain int
    within = item % PER_MATRIX
    # Row i begins at i (i + 1) / 2. Between the squares of two odd numbers no root is inexact.
    i = ((tl.sqrt((8 * within + 2).to(tl.float32)) - 1) / 2).to(tl.int32)
    return item // PER_MATRIX, i, within - i * (i + 1) // 2


@triton.jit
def _load(x, e, row, col, M: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
          DESCRIPTORS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """[BLOCK, BLOCK_K] at (row, col) of matrix e, which lies as [K, M] with COLUMNS."""
    if COLUMNS:
        return load_weight(x, e, col, row, K, M, BLOCK_K, BLOCK, 1, DESCRIPTORS).T
    return load_weight(x, e, row, col, M, K, BLOCK, BLOCK_K, 1, DESCRIPTORS)


@triton.jit
def _store(out, mirror, x, e, row, col, below, M: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """Write x at (row, col) of matrix e, and its transpose at (col, row) if all is below it."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    if DESCRIPTORS:
        x = x.to(out.dtype)
        out.store([e, row, col], x.reshape(1, rows, cols))
        # Behind the last matrix nothing is written; a branch keeps Triton from fusing the loops.
        e = tl.where(below, e, 0x3FFFFFFF)
        mirror.store([e, col, row], x.T.reshape(1, cols, rows))
    else:
        x = x.to(out.dtype.element_ty)
        r = row + tl.arange(0, rows)[:, None]
        c = col + tl.arange(0, cols)[None, :]
        inside = (r < M) & (c < M)
        base = out + e.to(tl.int64) * (M * M)
        tl.store(base + r * M + c, x, mask=inside)
        # No `inside & below`: Triton 3.9's interpreter makes integers of a scalar comparison.
        tl.store(base + c * M + r, x, mask=tl.where(below, inside, False))


@triton.jit
def symmetric_matmul_kernel(
    a,  # [B, M, K], or [B, K, M] with A_COLUMNS: tensor descriptor or pointer
    b,  # likewise
    add,  # [B, M, M]: tensor descriptor or pointer; or None
    out,  # [B, M, M]: tensor descriptor or pointer
    mirror,  # out through another descriptor, of its boxes transposed; or None
    items,
    alpha,
    beta,
    diagonal,
    M: tl.constexpr,
    K: tl.constexpr,
    A_COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    XCDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
):
    TILES: tl.constexpr = (M + BLOCK - 1) // BLOCK
    WIDTH: tl.constexpr = BLOCK // PIECES
    for item in tl.range(first_item(XCDS, True), items, tl.num_programs(0), flatten=FLATTEN):
        e, i, j = _place(item, TILES)
        row = i * BLOCK
        col = j * BLOCK
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(0, K, BLOCK_K):
            left = _load(a, e, row, start, M, K, A_COLUMNS, DESCRIPTORS, BLOCK, BLOCK_K)
            right = _load(b, e, col, start, M, K, B_COLUMNS, DESCRIPTORS, BLOCK, BLOCK_K)
            acc = tl.dot(left, right.T, acc)
        acc *= alpha
        r = row + tl.arange(0, BLOCK)[:, None]
        for index in tl.static_range(PIECES):
            first = col + index * WIDTH
            part = piece(acc, index, PIECES)
            if add is not None:
                more = load_weight(add, e, row, first, M, M, BLOCK, WIDTH, 1, DESCRIPTORS)
                part += beta * more.to(tl.float32)
            part += tl.where(r == first + tl.arange(0, WIDTH)[None, :], diagonal, 0.0)
            _store(out, mirror, part, e, row, first, j < i, M, DESCRIPTORS)


def symmetric_matmul(
    a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float, diagonal: float
) -> Tensor:
    count, size, depth = a.shape
    plan = plan_of(a)
    if not (a.numel() and plan.has("symmetric") and _fits(plan, size, depth)):
        return reference.symmetric_matmul(a, b, add, alpha=alpha, beta=beta, diagonal=diagonal)
    tile = plan.tile("symmetric")
    out = a.new_empty((count, size, size))
    add = None if add is None else operand(add)
    (a, a_columns), (b, b_columns) = _rows_or_columns(a), _rows_or_columns(b)
    args = (a, b, add, out, None)
    if plan.descriptors:
        box, lying = (1, tile.block_m, tile.block_k), (1, tile.block_k, tile.block_m)
        part = (1, tile.block_m, tile.block_m // _PIECES)
        args = (
            matrices(a, lying if a_columns else box),
            matrices(b, lying if b_columns else box),
            None if add is None else matrices(add, part),
            matrices(out, part),
            matrices(out, (1, part[2], part[1])),
        )
    tiles = cdiv(size, tile.block_m)
    items = count * (tiles * (tiles + 1) // 2)
    launch(
        symmetric_matmul_kernel,
        (plan.programs(items, tile),),
        *args,
        items,
        alpha,
        beta,
        diagonal,
        M=size,
        K=depth,
        A_COLUMNS=a_columns,
        B_COLUMNS=b_columns,
        DESCRIPTORS=plan.descriptors,
        XCDS=plan.xcds,
        FLATTEN=tile.flatten,
        BLOCK=tile.block_m,
        BLOCK_K=tile.block_k,
        PIECES=_PIECES,
        **tile.launch_options,
    )
    return out


def _rows_or_columns(x: Tensor) -> tuple[Tensor, bool]:
    """``x`` or its transpose, whichever is contiguous, aligned; True with the transpose."""
    columns = x.mT.is_contiguous() and not x.is_contiguous()
    return operand(x.mT if columns else x), columns


def _fits(plan: Plan, size: int, depth: int) -> bool:
    """Offsets in a matrix have 32 bits, and descriptors, if there are some, rows of 16 bytes."""
    whole = size % 8 == 0 and depth % 8 == 0
    return size * max(size, depth) < 2**31 and (whole or not plan.descriptors)
