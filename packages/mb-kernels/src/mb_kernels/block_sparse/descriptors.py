"""The block-sparse products on Hopper: operands and results through tensor descriptors.

The same products as in ``pointers``, for matrices that descriptors can describe. Both kernels are
persistent and have one loop for all tiles and their contractions (see ``language.tiles``), so that
the loads of the next tile run while the last one is stored. This makes short contractions, as in
the gradients of experts with few rows, a third faster.

Letters: B = 128, C blocks stored, R block rows, G matrices in a stack, TN, TK a tile.
"""

import triton
import triton.language as tl

from mb_kernels.language.tiles import halves, run_bounds, total_steps

# Outside of every stack and of every list of blocks: there, a descriptor loads zeros.
_OUTSIDE = tl.constexpr(0x3FFFFFFF)


@triton.jit
def _box(desc, matrix, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_MAJOR: tl.constexpr):
    """[ROWS, COLUMNS] at (i, j) of a matrix in a stack; zero outside it."""
    if ROW_MAJOR:
        return desc.load([matrix, i, j]).reshape(ROWS, COLUMNS)
    return tl.trans(desc.load([matrix, j, i]).reshape(COLUMNS, ROWS))


@triton.jit
def _store_box(desc, x, matrix, i, j, ROW_MAJOR: tl.constexpr):
    """Write x at (i, j) of a matrix in a stack; the boxes of ``desc`` are half as wide as x."""
    left, right = halves(x.to(desc.dtype))
    rows: tl.constexpr = left.shape[0]
    columns: tl.constexpr = left.shape[1]
    if ROW_MAJOR:
        desc.store([matrix, i, j], left.reshape(1, rows, columns))
        desc.store([matrix, i, j + columns], right.reshape(1, rows, columns))
    else:
        desc.store([matrix, j, i], left.T.reshape(1, columns, rows))
        desc.store([matrix, j + columns, i], right.T.reshape(1, columns, rows))


@triton.jit(do_not_specialize=["blocks", "block_rows"])
def sdd_tma_kernel(
    a,  # descriptor of the stack, its unit stride last
    b,  # likewise
    data,  # descriptor [C, B, B]
    row_indices_ptr,
    column_indices_ptr,
    block_offsets_ptr,
    offsets_ptr,
    block_rows,
    blocks,
    K,
    a_blocks,
    b_blocks,
    B: tl.constexpr,
    TK: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    COLUMN_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    used = tl.minimum(tl.load(offsets_ptr + block_rows), blocks)
    first = tl.program_id(0)
    # Flattening takes a contraction of the same length for each tile.
    for place in tl.range(first, used, tl.num_programs(0), flatten=True):
        block = place
        if COLUMN_ORDER:
            block = tl.load(block_offsets_ptr + place)
        row = tl.load(row_indices_ptr + block).to(tl.int32)
        column = tl.load(column_indices_ptr + block).to(tl.int32)
        a_matrix = row // a_blocks
        b_matrix = column // b_blocks
        a_row = (row - a_matrix * a_blocks) * B
        b_column = (column - b_matrix * b_blocks) * B
        acc = tl.zeros((B, B), tl.float32)
        for step in range(0, tl.cdiv(K, TK)):
            left = _box(a, a_matrix, a_row, step * TK, B, TK, A_ROW_MAJOR)
            right = _box(b, b_matrix, step * TK, b_column, TK, B, B_ROW_MAJOR)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        _store_box(data, acc, block, 0, 0, True)

    # Blocks that have storage but are not in the topology get zeros.
    for block in range(used + first, blocks, tl.num_programs(0)):
        _store_box(data, tl.zeros((B, B), tl.float32), block, 0, 0, True)


@triton.jit(do_not_specialize=["block_rows"])
def dsd_tma_kernel(
    data,  # descriptor [C, B, B]
    b,  # descriptor of the stack, its unit stride last
    out,  # likewise
    offsets_ptr,
    column_indices_ptr,
    block_offsets_ptr,
    block_rows,
    N,
    b_blocks,
    out_blocks,
    B: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    OUT_ROW_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Neighbouring tiles share a row of S and differ in the columns of b: S is read once into L2,
    # and so is the expert's b by the rows that are computed at the same time.
    n_tiles = tl.cdiv(N, TN)
    tiles = block_rows * n_tiles
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    STEPS: tl.constexpr = B // TK

    # A row without blocks takes one step of zeros.
    total = total_steps(offsets_ptr, tiles, n_tiles, B, TK)
    loading = first - programs
    storing = first
    next_position, next_end = run_bounds(offsets_ptr, first // n_tiles, block_rows)
    position = 0
    end = 0
    column = 0
    block = 0
    n0 = 0
    step = -1
    steps = 0
    acc = tl.zeros((B, TN), tl.float32)
    for _ in range(0, total):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            loading += programs
            n0 = (loading % n_tiles) * TN
            position = next_position
            end = next_end
            # The row after this one: its offsets arrive long before they are needed.
            row = (loading + programs) // n_tiles
            next_position, next_end = run_bounds(offsets_ptr, row, block_rows)
            any_block = position < end
            column = tl.load(column_indices_ptr + position, mask=any_block, other=0).to(tl.int32)
            block = position
            if TRANSPOSED:
                block = tl.load(block_offsets_ptr + position, mask=any_block, other=0)
            column = tl.where(any_block, column, _OUTSIDE)
            block = tl.where(any_block, block, _OUTSIDE)
            steps = tl.maximum((end - position) * STEPS, 1)
        k0 = (step % STEPS) * TK
        matrix = column // b_blocks
        b_row = (column - matrix * b_blocks) * B + k0
        left = _box(data, block, 0, k0, B, TK, not TRANSPOSED)
        right = _box(b, matrix, b_row, n0, TK, TN, B_ROW_MAJOR)
        # The next block's indices are loaded one step ahead, so that the loads of its elements can
        # be pipelined as if they did not depend on them.
        following = position + (step + 1) // STEPS
        column = tl.load(column_indices_ptr + following, mask=following < end, other=0)
        column = column.to(tl.int32)
        block = following
        if TRANSPOSED:
            block = tl.load(block_offsets_ptr + following, mask=following < end, other=0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        if step == steps - 1:
            row = storing // n_tiles
            matrix = row // out_blocks
            out_row = (row - matrix * out_blocks) * B
            _store_box(out, acc, matrix, out_row, (storing % n_tiles) * TN, OUT_ROW_MAJOR)
            acc = tl.zeros((B, TN), tl.float32)
            storing += programs
