"""Tiles of persistent kernels: which tile an item is, its matrix product, pieces of a tile."""

import triton
import triton.language as tl

from mb_kernels.language.memory import load_rows, load_weight


@triton.jit
def first_item(XCDS: tl.constexpr, EVEN: tl.constexpr):
    """This program's first item; programs of one XCD, with an L2 of its own, get neighbours.

    The hardware distributes programs over XCDs in turn. Not EVEN: their number may be no multiple
    of the XCDs', and those left over keep their place.
    """
    pid = tl.program_id(0)
    if XCDS > 1:
        place = pid % XCDS * (tl.num_programs(0) // XCDS) + pid // XCDS
        pid = place if EVEN else tl.where(pid < tl.num_programs(0) // XCDS * XCDS, place, pid)
    return pid


@triton.jit
def locate(item, total, tiles_ptr, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """(expert, first row, end row, column tile) of one item of a persistent loop.

    GROUP_M row tiles go through all columns together, so that both operands stay in L2.
    """
    width: tl.constexpr = GROUP_M * COLUMNS
    first = item // width * GROUP_M
    height = tl.minimum(total - first, GROUP_M)
    within = item % width
    tile = first + within % height
    return (
        tl.load(tiles_ptr + 4 * tile),
        tl.load(tiles_ptr + 4 * tile + 1),
        tl.load(tiles_ptr + 4 * tile + 2),
        within // height,
    )


# Where contractions differ in length, Triton does not fuse the loop over tiles with that over a
# tile's steps, and a tile's loads wait for the stores of the one before. The kernels with
# descriptors fuse them by hand: one loop over the steps of all tiles of a program. For software
# pipelining a step has to compute its state at its beginning, not at the end of the step before.
# And loads run ahead of stores, so that there are two current tiles, ``loading`` and ``storing``.
_CHUNK = tl.constexpr(128)  # tiles whose steps a program adds up at a time


@triton.jit
def total_steps(offsets_ptr, tiles, per_run, UNIT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Steps of all tiles of this program, ``per_run`` tiles for each run of the offsets.

    A tile has a step for every BLOCK_K of its run's length times UNIT, and one if it is empty.
    """
    programs = tl.num_programs(0)
    total = 0
    for first in range(tl.program_id(0), tiles, programs * _CHUNK):
        tile = first + tl.arange(0, _CHUNK) * programs
        inside = tile < tiles
        count = tl.load(offsets_ptr + tile // per_run + 1, mask=inside, other=0)
        count -= tl.load(offsets_ptr + tile // per_run, mask=inside, other=0)
        total += tl.sum(tl.where(inside, tl.maximum(tl.cdiv(count * UNIT, BLOCK_K), 1), 0))
    return total


@triton.jit
def run_bounds(offsets_ptr, run, runs):
    """Start and end of a run; zeros behind the last, for a program without another tile."""
    return (
        tl.load(offsets_ptr + run, mask=run < runs, other=0),
        tl.load(offsets_ptr + run + 1, mask=run < runs, other=0),
    )


@triton.jit
def multiply_rows(
    x,  # [N, K]: ragged tensor descriptor or pointer
    w,  # [E, M, K] with TRANSPOSE, else [E, K, M]: tensor descriptor or pointer
    e,
    row,
    count,
    col,
    K: tl.constexpr,
    M: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32: ``count`` rows of x times the columns from col on of w of expert e.

    Sums are fp32 in every dtype, and rows past ``count`` are zero.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        x_block = load_rows(x, row, count, start, K, BLOCK_M, BLOCK_K, DESCRIPTORS)
        if TRANSPOSE:
            w_block = load_weight(w, e, col, start, M, K, BLOCK_N, BLOCK_K, 1, DESCRIPTORS).T
        else:
            w_block = load_weight(w, e, start, col, K, M, BLOCK_K, BLOCK_N, 1, DESCRIPTORS)
        acc = tl.dot(x_block, w_block, acc, input_precision=PRECISION)
    return acc


@triton.jit
def halves(x):
    """Left and right half of the columns of x; register moves only."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (m, 2, n // 2)), (0, 2, 1)))


@triton.jit
def pairs(x):
    """Even and odd columns of x; register moves only."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def piece(x, INDEX: tl.constexpr, PIECES: tl.constexpr):
    """One of 2, 4 or 8 equal pieces of the columns of x; register moves only."""
    left, right = halves(x)
    part = left if INDEX < PIECES // 2 else right
    if PIECES > 2:
        left, right = halves(part)
        part = left if INDEX % (PIECES // 2) < PIECES // 4 else right
    if PIECES > 4:
        left, right = halves(part)
        part = left if INDEX % 2 == 0 else right
    return part
