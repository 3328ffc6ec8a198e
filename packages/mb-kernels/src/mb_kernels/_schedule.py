"""Which output tile a program computes, decided on the device: no count ever reaches the host.

A small kernel turns expert offsets into a list of row tiles, each within one expert. The matrix
kernels are persistent: a fixed number of programs walks (row tile, column tile) pairs, so a launch
has static sizes and a CUDA graph can hold it.

Letters: N rows, E experts, E1 = E + 1.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import load_ragged

from mb_kernels._launch import cdiv, launch, power_of_two
from mb_kernels.bins import SMALLEST_BLOCK_M, row_tiles
from mb_kernels.targets import GateCase, Target

_BLOCK = 16  # row tiles listed by one program


@triton.jit
def schedule_kernel(
    offsets_ptr,  # [E + 1] int32
    tiles_ptr,  # [tiles, 4] int32: expert, first row, end row, and two totals in column 3
    rows,
    E: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two above E: the experts, and the dropped rows as group E
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    start = tl.load(offsets_ptr + group, mask=group <= E, other=0)
    end = tl.load(offsets_ptr + group + 1, mask=group < E, other=0)
    end = tl.where(group == E, rows, end)
    tiles = tl.where(group <= E, tl.cdiv(end - start, BLOCK_M), 0)
    last = tl.cumsum(tiles, 0)  # [GROUPS] one past the last tile of each group
    total = tl.sum(tiles, 0)

    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The tile belongs to the group after all those that end at or before it.
    owner = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)  # [BLOCK]
    mine = owner[:, None] == group[None, :]
    first_tile = tl.sum(tl.where(mine, (last - tiles)[None, :], 0), 1)
    row = tl.sum(tl.where(mine, start[None, :], 0), 1) + (tile - first_tile) * BLOCK_M
    row_end = tl.sum(tl.where(mine, end[None, :], 0), 1)
    inside = tile < total
    tl.store(tiles_ptr + 4 * tile, owner, mask=inside)
    tl.store(tiles_ptr + 4 * tile + 1, row, mask=inside)
    tl.store(tiles_ptr + 4 * tile + 2, row_end, mask=inside)
    if tl.program_id(0) == 0:
        dropped = tl.sum(tl.where(group == E, tiles, 0), 0)
        tl.store(tiles_ptr + 3, total - dropped)
        tl.store(tiles_ptr + 7, total)


def schedule(offsets: Tensor, rows: int, block_m: int) -> Tensor:
    """Row tiles of ``block_m`` rows: [tiles, 4] int32, of one size whatever ``block_m`` is.

    Tile t covers rows tiles[t, 1] to min(tiles[t, 1] + block_m, tiles[t, 2]) of expert tiles[t, 0].
    Rows of dropped slots come last, as expert E. tiles[0, 3] counts the experts' tiles,
    tiles[1, 3] all of them.
    """
    experts = offsets.shape[0] - 1
    assert block_m >= SMALLEST_BLOCK_M
    tiles = offsets.new_empty((row_tiles(rows, experts), 4))
    launch(
        schedule_kernel,
        (cdiv(row_tiles(rows, experts, block_m), _BLOCK),),
        offsets,
        tiles,
        rows,
        E=experts,
        GROUPS=power_of_two(experts + 1),
        BLOCK_M=block_m,
        BLOCK=_BLOCK,
    )
    return tiles


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
def first_item(XCDS: tl.constexpr):
    """This program's first item; programs of one XCD, with an L2 of its own, get neighbours."""
    pid = tl.program_id(0)
    if XCDS > 1:
        pid = pid % XCDS * (tl.num_programs(0) // XCDS) + pid // XCDS
    return pid


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
        # A 64-bit scalar base and 32-bit offsets inside the tile: the form AMD's buffer loads need.
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
def token_rows(source, token, COLS: tl.constexpr, BLOCK_C: tl.constexpr, WIDE: tl.constexpr):
    """(base, offsets) of the first BLOCK_C columns of rows ``token`` of source [T, COLS].

    WIDE makes base a block of 64-bit pointers: needed beyond 2**31 elements, and on NVIDIA in a
    flattened loop, where only this form becomes asynchronous copies. Otherwise a scalar base and
    32-bit offsets save registers, and are what AMD's buffer loads need.
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
        block = load_ragged(x, row, count, [0, col])
    else:
        r = tl.arange(0, BLOCK_R)
        c = tl.arange(0, BLOCK_C)
        base = x + row.to(tl.int64) * COLS + col
        m = (r < count)[:, None]
        mask = m if COLS % BLOCK_C == 0 else m & (col + c < COLS)[None, :]
        block = tl.load(base + r[:, None] * COLS + c[None, :], mask=mask, other=0.0)
    return block


@triton.jit
def store_rows(out, block, part: tl.constexpr, parts: tl.constexpr, row, count, col,
               COLS: tl.constexpr, BLOCK: tl.constexpr, DESCRIPTORS: tl.constexpr):  # fmt: skip
    """Write the first ``count`` rows of block at (row, part, col) of out [N, parts, COLS].

    BLOCK is the width of the tile that block is a piece of.

    The ragged descriptor checks both ends in hardware, and its copy runs behind the program.
    """
    if DESCRIPTORS:
        # The coordinates of triton.tools.ragged_tma.store_ragged for rows row to row + count.
        block = tl.reshape(block.to(out.dtype), (1, 1, block.shape[0], 1, block.shape[1]))
        out.store([0x40000000, row + count, 0x40000000 - count, part, col], block)
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


def gate_cases(target: Target) -> list[GateCase]:
    constants: dict[str, Any] = {"E": 64, "GROUPS": 128, "BLOCK_M": 128, "BLOCK": _BLOCK}
    signature = {"offsets_ptr": "*i32", "tiles_ptr": "*i32", "rows": "i32"}
    return [
        GateCase(name="schedule", kernel=schedule_kernel, signature=signature, constexprs=constants)
    ]
