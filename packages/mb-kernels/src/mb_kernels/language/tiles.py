"""Which tile an item of a persistent loop is, and pieces of a tile."""

import triton
import triton.language as tl


@triton.jit
def first_item(XCDS: tl.constexpr):
    """This program's first item; programs of one XCD, with an L2 of its own, get neighbours."""
    pid = tl.program_id(0)
    if XCDS > 1:
        pid = pid % XCDS * (tl.num_programs(0) // XCDS) + pid // XCDS
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


@triton.jit
def halves(x):
    """Left and right half of the columns of x; register moves only."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (m, 2, n // 2)), (0, 2, 1)))


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
