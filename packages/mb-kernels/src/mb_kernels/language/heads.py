"""Tensors [T, HEADS, C], of which a program reads and writes the rows of one head.

Letters: T tokens, HEADS heads, C width of a head.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(x, start, head, HEADS: tl.constexpr, C: tl.constexpr):
    """Where the rows of a head begin in x [T, HEADS, C], from token `start` on."""
    return x + (tl.cast(start, tl.int64) * HEADS + head) * C


@triton.jit
def load(rows, first, length, HEADS: tl.constexpr, C: tl.constexpr,
         BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, first_c=0):  # fmt: skip
    """[BLOCK, BLOCK_C] of `rows_of` x from (first, first_c) on, 0 beyond `length` rows and C."""
    row = tl.arange(0, BLOCK)[:, None]
    c = first_c + tl.arange(0, BLOCK_C)[None, :]
    base = rows + tl.cast(first, tl.int64) * (HEADS * C)
    return tl.load(base + row * (HEADS * C) + c, mask=(first + row < length) & (c < C), other=0.0)


@triton.jit
def store(rows, block, first, length, HEADS: tl.constexpr, C: tl.constexpr, first_c=0):
    """Write block where `load` reads."""
    row = tl.arange(0, block.shape[0])[:, None]
    c = first_c + tl.arange(0, block.shape[1])[None, :]
    base = rows + tl.cast(first, tl.int64) * (HEADS * C)
    inside = (first + row < length) & (c < C)
    tl.store(base + row * (HEADS * C) + c, block.to(rows.dtype.element_ty), mask=inside)
