"""Which rows a program multiplies, decided on the device: no count ever reaches the host.

A small kernel turns expert offsets into a list of row tiles, each within one expert. The matrix
kernels are persistent: a fixed number of programs walks (row tile, column tile) pairs, so a launch
has static sizes and a CUDA graph can hold it.

Letters: N rows, E experts, E1 = E + 1.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.bins import SMALLEST_BLOCK_M, row_tiles
from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two

# Row tiles listed by one program, each compared with every group: of 256, 32 per thread of 4 warps.
_BLOCK = 16


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
    require_countable("rows", rows)
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
