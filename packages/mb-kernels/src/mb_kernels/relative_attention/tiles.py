"""What all kernels of attention do with a tile: multiply it, score it.

Letters: T tokens, H query heads, G key-value heads, C width of a head, N segments, S the longest
segment there may be, A = 2 S - 1 distances. HEADS stands for H or G.
"""

import triton
import triton.language as tl

from mb_kernels.language.heads import load


@triton.jit
def product(x_block, y_block, x, y, first_x, first_y, length, HEADS_X: tl.constexpr,
            HEADS_Y: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
            PART: tl.constexpr):  # fmt: skip
    """[BLOCK_X, BLOCK_Y] of x y^T, rows of heads both.

    Of heads wider than PART both are read anew, PART columns at a time, so that registers hold no
    more of them. A block that nothing else uses is then never read, for the compiler drops it.
    """
    BLOCK_X: tl.constexpr = x_block.shape[0]
    BLOCK_Y: tl.constexpr = y_block.shape[0]
    if x_block.shape[1] <= PART:
        acc = tl.dot(x_block, tl.trans(y_block), input_precision=PRECISION)
    else:
        acc = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
        for c in range(0, C, PART):
            x_part = load(x, first_x, length, HEADS_X, C, BLOCK_X, PART, c)
            y_part = load(y, first_y, length, HEADS_Y, C, BLOCK_Y, PART, c)
            acc = tl.dot(x_part, tl.trans(y_part), acc, input_precision=PRECISION)
    return acc


@triton.jit
def scores(products, bias, query, key, length, scale, S, CAUSAL: tl.constexpr):
    """Scores of the places `query` and `key` of a segment, -inf where one is not to be seen."""
    seen = (query < length) & (key < length)
    if CAUSAL:
        seen &= key <= query
    by_distance = tl.load(bias + (S - 1 + key - query), mask=seen, other=float("-inf"))
    return products * scale + by_distance.to(tl.float32)


@triton.jit
def numbers_of(numbers, query, length):
    """Of each query its number, 0 beyond the segment."""
    return tl.load(numbers + query, mask=query < length, other=0.0)


@triton.jit
def segment_of(offsets, BLOCKS, BLOCK: tl.constexpr):
    """(start, length, first place) of this program's block of a segment."""
    start = tl.load(offsets + tl.program_id(0) // BLOCKS)
    end = tl.load(offsets + tl.program_id(0) // BLOCKS + 1)
    return start, (end - start).to(tl.int32), tl.program_id(0) % BLOCKS * BLOCK
