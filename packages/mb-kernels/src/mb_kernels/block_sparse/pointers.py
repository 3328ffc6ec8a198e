"""Device code of the block-sparse products; ``mb_kernels.block_sparse.kernels`` launches it.

There are two kernels: ``sdd`` computes the blocks a topology names, ``dsd`` sums a row of blocks
times dense rows. Transposes and ``dds`` are the same with other strides. Every pointer is a 64-bit
scalar base plus 32-bit offsets within the tile, which AMD's compiler can turn into buffer loads.
Offsets within a tile reach over 128 rows and columns: ``block_sparse.kernels`` refuses strides for
which they would overflow. Hopper uses the kernels in ``descriptors``, and these in fp32 and for
odd sizes.

Letters: B = 128, C blocks stored, R block rows, G matrices in a stack, TM, TN, TK a tile.
"""

import triton
import triton.language as tl

from mb_kernels.language.tiles import first_item


@triton.jit
def sdd_kernel(
    a_ptr,
    b_ptr,
    data_ptr,
    row_indices_ptr,
    column_indices_ptr,
    block_offsets_ptr,
    offsets_ptr,
    block_rows,
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
    COLUMN_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
):
    # A program computes a block or a part of one. Walking down the columns of the matrix instead of
    # along its rows keeps the blocks computed at one time close to a square, where a row is long.
    PARTS: tl.constexpr = (B // TM) * (B // TN)
    tile = first_item(XCDS, False)
    block = tile // PARTS
    m0 = (tile % PARTS) // (B // TN) * TM
    n0 = (tile % PARTS) % (B // TN) * TN
    used = tl.load(offsets_ptr + block_rows)
    if COLUMN_ORDER:  # of the blocks that are in use: the rest of the list may be anything
        block = tl.where(block < used, tl.load(block_offsets_ptr + block), block)
    row = tl.load(row_indices_ptr + block).to(tl.int32)
    column = tl.load(column_indices_ptr + block).to(tl.int32)
    a_matrix = row // a_blocks
    b_matrix = column // b_blocks
    a_row = (row - a_matrix * a_blocks) * B + m0
    b_column = (column - b_matrix * b_blocks) * B + n0

    m = tl.arange(0, TM)
    n = tl.arange(0, TN)
    k = tl.arange(0, TK)
    a_tile = m[:, None] * stride_am + k[None, :] * stride_ak
    b_tile = k[:, None] * stride_bk + n[None, :] * stride_bn
    a_base = a_ptr + a_matrix.to(tl.int64) * stride_ag + a_row.to(tl.int64) * stride_am
    b_base = b_ptr + b_matrix.to(tl.int64) * stride_bg + b_column.to(tl.int64) * stride_bn
    acc = tl.zeros((TM, TN), tl.float32)
    # Blocks that have storage but are not in the topology get zeros.
    end = tl.where(block < used, K, 0)
    for k0 in range(0, end, TK):
        if EVEN_K:
            a = tl.load(a_base + a_tile)
            b = tl.load(b_base + b_tile)
        else:
            a = tl.load(a_base + a_tile, mask=(k0 + k < K)[None, :], other=0.0)
            b = tl.load(b_base + b_tile, mask=(k0 + k < K)[:, None], other=0.0)
        a_base += TK * stride_ak
        b_base += TK * stride_bk
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out = data_ptr + block.to(tl.int64) * (B * B) + m0 * B + n0
    tl.store(out + m[:, None] * B + n[None, :], acc.to(data_ptr.dtype.element_ty))


@triton.jit
def dsd_kernel(
    data_ptr,
    b_ptr,
    out_ptr,
    offsets_ptr,
    column_indices_ptr,
    block_offsets_ptr,
    block_rows,
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
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    XCDS: tl.constexpr,
):
    # Neighbouring tiles share a row of S and differ in the columns of b: S is read once into L2,
    # and so is the expert's b by the rows that are computed at the same time.
    n_tiles = tl.cdiv(N, TN)
    tiles = block_rows * (B // TM) * n_tiles
    m = tl.arange(0, TM)
    n = tl.arange(0, TN)
    k = tl.arange(0, TK)
    STEPS: tl.constexpr = B // TK
    for tile in range(first_item(XCDS, False), tiles, tl.num_programs(0)):
        part = tile // n_tiles
        n0 = (tile % n_tiles) * TN
        row = part // (B // TM)
        m0 = part % (B // TM) * TM
        position = tl.load(offsets_ptr + row)
        end = tl.load(offsets_ptr + row + 1)
        inside = (n0 + n < N)[None, :]
        s_tile = (m0 + m)[:, None] * stride_sm + k[None, :] * stride_sk
        b_tile = k[:, None] * stride_bk + n[None, :] * stride_bn
        acc = tl.zeros((TM, TN), tl.float32)
        # The next block's indices are loaded one step ahead, so that the loads of its elements can
        # be pipelined as if they did not depend on them.
        column = tl.load(column_indices_ptr + position, mask=position < end, other=0).to(tl.int32)
        block = position
        if TRANSPOSED:
            block = tl.load(block_offsets_ptr + position, mask=position < end, other=0)
        for step in range(0, (end - position) * STEPS):
            k0 = (step % STEPS) * TK  # ty: ignore[unsupported-operator]  (an int when compiled)
            matrix = column // b_blocks
            b_row = (column - matrix * b_blocks) * B + k0
            s_base = data_ptr + block.to(tl.int64) * (B * B) + k0 * stride_sk
            b_base = b_ptr + matrix.to(tl.int64) * stride_bg + b_row.to(tl.int64) * stride_bk
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

        matrix = row // out_blocks
        out_row = (row - matrix * out_blocks) * B + m0
        out = out_ptr + matrix.to(tl.int64) * stride_og + out_row.to(tl.int64) * stride_om
        out += n0.to(tl.int64) * stride_on
        out_tile = m[:, None] * stride_om + n[None, :] * stride_on
        tl.store(out + out_tile, acc.to(out_ptr.dtype.element_ty), mask=inside)
