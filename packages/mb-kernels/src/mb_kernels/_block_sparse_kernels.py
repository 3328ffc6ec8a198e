"""Device code of the block-sparse products; ``mb_kernels._block_sparse`` launches it.

Two products serve all: ``sdd`` computes the blocks a topology names, ``dsd`` sums a row of blocks
times dense rows; transposes and ``dds`` are these with other strides. Operands are loaded through
descriptors (Hopper's tensor memory accelerator) or pointers. Every pointer is a 64-bit scalar base
plus small 32-bit offsets within the tile: no index overflows however many rows there are, and AMD's
compiler can use buffer loads.

Letters: B = 128, C blocks stored, R block rows, G matrices in a stack, TM, TN, TK a tile.
"""

import triton
import triton.language as tl


@triton.jit
def _program(XCDS: tl.constexpr):
    """This program's place in the order of work: programs of one XCD, with its own L2, together."""
    pid = tl.program_id(0)
    if XCDS > 1:
        share = tl.num_programs(0) // XCDS
        # The hardware deals programs to XCDs in turn; those that do not divide evenly stay put.
        pid = tl.where(pid < share * XCDS, pid % XCDS * share + pid // XCDS, pid)
    return pid


@triton.jit
def _stacked(block, blocks_per_matrix, stride_g, stride_b, B: tl.constexpr):
    """Offset of a block of rows in a stack of matrices; 64 bits before anything is multiplied."""
    matrix = block // blocks_per_matrix
    within = block - matrix * blocks_per_matrix
    return matrix.to(tl.int64) * stride_g + within.to(tl.int64) * B * stride_b


@triton.jit
def _box(desc, matrix, i, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_MAJOR: tl.constexpr):
    """[ROWS, COLUMNS] at (i, j) of a matrix in a stack, through a descriptor; zero outside it."""
    if ROW_MAJOR:
        return desc.load([matrix, i, j]).reshape(ROWS, COLUMNS)
    return tl.trans(desc.load([matrix, j, i]).reshape(COLUMNS, ROWS))


@triton.jit
def sdd_kernel(
    a_ptr,  # or a descriptor of the stack, its unit stride last
    b_ptr,  # likewise
    data_ptr,
    row_indices_ptr,
    column_indices_ptr,
    used_ptr,
    blocks,
    K,
    a_blocks,
    stride_ag,
    stride_am,
    stride_ak,
    b_blocks,
    stride_bg,
    stride_bk,
    stride_bn,
    B: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
):
    # A program computes a block, a part of one, or two that follow each other in storage: these
    # are one product if they are neighbours in the matrix, as most are in an expert layer, and
    # else two, each with half of the tile unused.
    ACROSS: tl.constexpr = TN // B
    PARTS: tl.constexpr = (B // TM) * (B // TN + ACROSS // 2)
    pid = _program(XCDS)
    block = pid // PARTS
    m0 = (pid % PARTS) // (PARTS * TM // B) * TM
    n0 = (pid % PARTS) % (PARTS * TM // B) * TN
    products = 1
    width = B
    if ACROSS == 2:
        block *= 2
        if block + 1 < blocks:
            row = tl.load(row_indices_ptr + block).to(tl.int32)
            column = tl.load(column_indices_ptr + block).to(tl.int32)
            next_row = tl.load(row_indices_ptr + block + 1).to(tl.int32)
            next_column = tl.load(column_indices_ptr + block + 1).to(tl.int32)
            together = (row == next_row) & (column + 1 == next_column)
            together = together & (column // b_blocks == next_column // b_blocks)
            together = together & (block + 1 < tl.load(used_ptr))
            products = tl.where(together, 1, 2)
            width = tl.where(together, 2 * B, B)

    m = tl.arange(0, TM)
    n = tl.arange(0, TN)
    k = tl.arange(0, TK)
    for _ in range(products):
        row = tl.load(row_indices_ptr + block).to(tl.int32)
        column = tl.load(column_indices_ptr + block).to(tl.int32)
        acc = tl.zeros((TM, TN), tl.float32)
        # Blocks that have storage but are not in the topology get zeros.
        end = tl.where(block < tl.load(used_ptr), K, 0)
        if DESCRIPTORS:
            a_matrix = row // a_blocks
            b_matrix = column // b_blocks
            a_row = (row - a_matrix * a_blocks) * B + m0
            b_column = (column - b_matrix * b_blocks) * B + n0
            for k0 in range(0, end, TK):
                a = _box(a_ptr, a_matrix, a_row, k0, TM, TK, A_ROW_MAJOR)
                b = _box(b_ptr, b_matrix, k0, b_column, TK, TN, B_ROW_MAJOR)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
        else:
            a_base = a_ptr + _stacked(row, a_blocks, stride_ag, stride_am, B) + m0 * stride_am
            b_base = b_ptr + _stacked(column, b_blocks, stride_bg, stride_bn, B) + n0 * stride_bn
            a_tile = m[:, None] * stride_am + k[None, :] * stride_ak
            b_tile = k[:, None] * stride_bk + n[None, :] * stride_bn
            for k0 in range(0, end, TK):
                if EVEN_K:
                    a = tl.load(a_base + a_tile)
                    b = tl.load(b_base + b_tile)
                else:
                    a = tl.load(a_base + a_tile, mask=(k0 + k < K)[None, :], other=0.0)
                    b = tl.load(b_base + b_tile, mask=(k0 + k < K)[:, None], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
                a_base += TK * stride_ak
                b_base += TK * stride_bk
        out = data_ptr + block.to(tl.int64) * (B * B) + m0 * B + n0
        out_tile = m[:, None] * B + (n // B * (B * B) + n % B)[None, :]
        values = acc.to(data_ptr.dtype.element_ty)
        if ACROSS == 2:
            tl.store(out + out_tile, values, mask=(n < width)[None, :])
        else:
            tl.store(out + out_tile, values)
        block += 1


@triton.jit
def dsd_kernel(
    data_ptr,  # or a descriptor [C, B, B]
    b_ptr,  # or a descriptor of the stack, its unit stride last
    out_ptr,
    offsets_ptr,
    column_indices_ptr,
    block_offsets_ptr,
    N,
    stride_sm,
    stride_sk,
    b_blocks,
    stride_bg,
    stride_bk,
    stride_bn,
    out_blocks,
    stride_og,
    stride_om,
    stride_on,
    B: tl.constexpr,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    EVEN_N: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
):
    # Neighbouring programs share a row of S and differ in the columns of b: S is read once into
    # L2, and so is the expert's b by the rows that run at the same time.
    n_tiles = tl.cdiv(N, TN)
    pid = _program(XCDS)
    part = pid // n_tiles
    n0 = (pid % n_tiles) * TN
    row = part // (B // TM)
    m0 = part % (B // TM) * TM
    position = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)

    m = tl.arange(0, TM)
    n = tl.arange(0, TN)
    k = tl.arange(0, TK)
    inside = (n0 + n < N)[None, :]
    s_tile = (m0 + m)[:, None] * stride_sm + k[None, :] * stride_sk
    b_tile = k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros((TM, TN), tl.float32)
    STEPS: tl.constexpr = B // TK
    # The next block's indices are loaded one step ahead, so that the loads of its elements can be
    # pipelined as if they did not depend on them.
    column = tl.load(column_indices_ptr + position, mask=position < end, other=0).to(tl.int32)
    block = position
    if TRANSPOSED:
        block = tl.load(block_offsets_ptr + position, mask=position < end, other=0)
    for step in range(0, (end - position) * STEPS):
        k0 = (step % STEPS) * TK  # ty: ignore[unsupported-operator]  (a Python int when compiled)
        if DESCRIPTORS:
            matrix = column // b_blocks
            b_row = (column - matrix * b_blocks) * B + k0
            s = _box(data_ptr, block, m0, k0, TM, TK, not TRANSPOSED)
            b = _box(b_ptr, matrix, b_row, n0, TK, TN, B_ROW_MAJOR)
        else:
            s_base = data_ptr + block.to(tl.int64) * (B * B) + k0 * stride_sk
            b_base = b_ptr + _stacked(column, b_blocks, stride_bg, stride_bk, B) + k0 * stride_bk
            b_base += n0.to(tl.int64) * stride_bn
            s = tl.load(s_base + s_tile)
            if EVEN_N:
                b = tl.load(b_base + b_tile)
            else:
                b = tl.load(b_base + b_tile, mask=inside, other=0.0)
        following = position + (step + 1) // STEPS
        column = tl.load(column_indices_ptr + following, mask=following < end, other=0)
        column = column.to(tl.int32)
        block = following
        if TRANSPOSED:
            block = tl.load(block_offsets_ptr + following, mask=following < end, other=0)
        acc = tl.dot(s, b, acc, input_precision=PRECISION)

    out = out_ptr + _stacked(row, out_blocks, stride_og, stride_om, B)
    out += n0.to(tl.int64) * stride_on
    out_tile = (m0 + m)[:, None] * stride_om + n[None, :] * stride_on
    tl.store(out + out_tile, acc.to(out_ptr.dtype.element_ty), mask=inside)
