"""Loads and stores of tiles, through tensor descriptors or pointers.

Letters: T tokens, N rows, E experts.
"""

import triton
import triton.language as tl


@triton.jit
def load_weight(
    w,
    e,
    row,
    col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STACK: tl.constexpr,  # load the same block of this many matrices, one over the other
    DESCRIPTORS: tl.constexpr,
):
    """[STACK * BLOCK_R, BLOCK_C] at (row, col) of matrices STACK*e.. of [ROWS, COLS]; 0 outside."""
    if DESCRIPTORS:
        block = tl.reshape(w.load([STACK * e, row, col]), (STACK * BLOCK_R, BLOCK_C))
    else:
        # A 64-bit scalar base and 32-bit offsets inside the tile, as AMD's buffer loads need.
        base = w + e.to(tl.int64) * (STACK * ROWS * COLS) + row * COLS + col
        r = tl.arange(0, STACK * BLOCK_R)
        c = tl.arange(0, BLOCK_C)
        offsets = (r // BLOCK_R * ROWS + r % BLOCK_R)[:, None] * COLS + c[None, :]
        if ROWS % BLOCK_R == 0 and COLS % BLOCK_C == 0:
            block = tl.load(base + offsets)
        else:
            inside = (row + r % BLOCK_R < ROWS)[:, None] & (col + c < COLS)[None, :]
            block = tl.load(base + offsets, mask=inside, other=0.0)
    return block


@triton.jit
def load_transposed(
    w,
    e,
    row,
    col,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STACK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,  # with STACK = 1 alone: of two blocks no reshape makes one
):
    """[BLOCK_R, STACK * BLOCK_C] at (row, col + s COLS) of matrix e of [ROWS, STACK * COLS]."""
    if DESCRIPTORS:
        tl.static_assert(STACK == 1)
        block = tl.reshape(w.load([e, row, col]), (BLOCK_R, BLOCK_C))
    else:
        base = w + e.to(tl.int64) * (STACK * ROWS * COLS) + row * (STACK * COLS) + col
        r = tl.arange(0, BLOCK_R)
        c = tl.arange(0, STACK * BLOCK_C)
        offsets = r[:, None] * (STACK * COLS) + (c // BLOCK_C * COLS + c % BLOCK_C)[None, :]
        if ROWS % BLOCK_R == 0 and COLS % BLOCK_C == 0:
            block = tl.load(base + offsets)
        else:
            inside = (row + r < ROWS)[:, None] & (col + c % BLOCK_C < COLS)[None, :]
            block = tl.load(base + offsets, mask=inside, other=0.0)
    return block


@triton.jit
def token_rows(source, token, COLS: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr):
    """(base, offsets) of the first BLOCK_C columns of rows ``token`` of source [T, COLS].

    WIDE makes base a block of 64-bit pointers. That is needed beyond 2**31 elements, and on NVIDIA
    in a flattened loop, where only such loads become asynchronous copies. Otherwise a scalar base
    and 32-bit offsets save registers, and AMD's buffer loads need them.
    """
    offsets = tl.arange(0, BLOCK_C)[None, :]
    if WIDE:
        base = source + token.to(tl.int64)[:, None] * COLS + offsets
        offsets = 0
    else:
        base = source
        offsets += token[:, None] * COLS
    return base, offsets


@triton.jit
def load_picked(x, row, live, d, D):
    """[rows, len(d)] of x [any, D] at the rows ``row`` where ``live``, columns d; 0 elsewhere."""
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(x + at, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_picked(y, value, row, live, d, D):
    """Write value where ``load_picked`` reads."""
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def home_rows(y, home_ptr, region, row, live, D):
    """[rows, 1] of pointers to rows ``row`` of y [any, D].

    With home_ptr, int64 [P], the rows belong to P ranks, ``region`` to each, and are in the ranks'
    memories: those of rank p from the address home_ptr[p] on, a multiple of 16.
    """
    if home_ptr is None:
        at = y + row.to(tl.int64)[:, None] * D
    else:
        p = row // region
        base = tl.load(home_ptr + p, mask=live, other=0).to(tl.pointer_type(y.dtype.element_ty))
        at = (base + (row - p * region).to(tl.int64) * D)[:, None]
        at = tl.multiple_of(at, [16, 16])  # else each number is a store of its own
    return at


@triton.jit
def ragged_place(row, count, at):
    """The first three coordinates of row ``row + at`` in a descriptor by ``descriptors.ragged``.

    With them the hardware checks both ends of rows row to row + count: beyond the last one the
    third coordinate is 2**30 or more, which is out of bounds. The stride of the first coordinate
    takes the 2**30 out of the address again.
    """
    place = 0x40000000 - count + at
    return 0x40000000, row + count, place


@triton.jit
def load_ragged(x, row, count, at, col, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """[BLOCK_R, BLOCK_C] at (row + at, col) of rows row to row + count; zeros beyond them."""
    beyond, end, place = ragged_place(row, count, at)
    return tl.reshape(x.load([beyond, end, place, col]), (BLOCK_R, BLOCK_C))


@triton.jit
def load_rows(
    x,
    row,
    count,
    col,
    COLS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """[BLOCK_R, BLOCK_C] of x [N, COLS] at (row, col): ``count`` rows, and zeros after them."""
    if DESCRIPTORS:
        block = load_ragged(x, row, count, 0, col, BLOCK_R, BLOCK_C)
    else:
        r = tl.arange(0, BLOCK_R)
        c = tl.arange(0, BLOCK_C)
        base = x + row.to(tl.int64) * COLS + col
        m = (r < count)[:, None]
        mask = m if COLS % BLOCK_C == 0 else m & (col + c < COLS)[None, :]
        block = tl.load(base + r[:, None] * COLS + c[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def load_bias(b, e, part: tl.constexpr, parts: tl.constexpr, col, COLS: tl.constexpr,
              BLOCK: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """[1, W] fp32 at columns col.. of part ``part`` of b [E, parts, COLS].

    BLOCK is the width of the tile that the columns are a piece of.
    """
    cols = col + tl.arange(0, W)
    at = b + (e.to(tl.int64) * parts + part) * COLS + cols
    values = tl.load(at) if COLS % BLOCK == 0 else tl.load(at, mask=cols < COLS, other=0.0)
    return values.to(tl.float32)[None, :]


@triton.jit
def scaled(z, row_scales, s, e, part: tl.constexpr, parts: tl.constexpr, col, COLS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """z, a piece of a product of codes, times the scales of its rows and of its columns.

    The columns are col.. of part ``part`` of s [E, parts, COLS]; z itself without an s.
    """
    if s is not None:
        z *= row_scales[:, None] * load_bias(s, e, part, parts, col, COLS, BLOCK, z.shape[1])
    return z


@triton.jit
def store_rows(out, block, part: tl.constexpr, parts: tl.constexpr, row, count, col,
               COLS: tl.constexpr, BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Write the first ``count`` rows of block at (row, part, col) of out [N, parts, COLS].

    BLOCK is the width of the tile that block is a piece of.

    The ragged descriptor checks both ends in hardware, and its copy runs behind the program.
    """
    if DESCRIPTORS:
        block = tl.reshape(block.to(out.dtype), (1, 1, block.shape[0], 1, block.shape[1]))
        beyond, end, at = ragged_place(row, count, 0)
        out.store([beyond, end, at, part, col], block)
    else:
        r = tl.arange(0, block.shape[0])[:, None]
        cols = (col + tl.arange(0, block.shape[1]))[None, :]
        # Offsets within the tile fit 32 bits.
        base = out + row.to(tl.int64) * (parts * COLS) + part * COLS
        value = block.to(out.dtype.element_ty)
        if COLS % BLOCK == 0:
            tl.store(base + r * (parts * COLS) + cols, value, mask=r < count)
        else:
            mask = (r < count) & (cols < COLS)
            tl.store(base + r * (parts * COLS) + cols, value, mask=mask)
