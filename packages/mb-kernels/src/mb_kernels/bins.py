"""``Bins``: which expert takes which routed slot, as four index arrays of static size.

Letters: T tokens, K top-k, N = T·K slots and rows, E experts, E1 = E + 1.
"""

from typing import NamedTuple

from torch import Tensor


class Bins(NamedTuple):
    """Routed slots sorted by expert; every field int32, on the device, of static size.

    Slot s = t·K + k is choice k of token t. Rows are slots sorted by expert, in slot order within
    an expert, so row r of the experts' input is token ``order_N[r] // K``. Nothing here is read
    by the host, so a CUDA graph can hold the whole layer.
    """

    order_N: Tensor
    """Row r holds slot order_N[r]; rows from offsets_E1[-1] on hold the dropped slots,
    by expert too, and behind them the slots of no expert."""
    inverse_N: Tensor
    """Row of slot s, or -1 if the slot was dropped."""
    tokens_per_expert_E: Tensor
    """Slots routed to each expert, before capacity drops any."""
    offsets_E1: Tensor
    """Expert e computes rows offsets_E1[e] to offsets_E1[e + 1], after capacity."""


def offsets_list(offsets_E1: Tensor, rows: int) -> list[int]:
    """The offsets on the host; ValueError unless they divide up the first of ``rows`` rows."""
    offsets = offsets_E1.tolist()
    if offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > rows:
        raise ValueError(
            f"offsets_E1: expected to start at 0, never to fall, and to end at most at {rows}, the "
            f"number of rows; got {offsets}. Use bins.offsets_E1 of the same rows."
        )
    return offsets


# The least height of a row tile: what a list of tiles, whatever their height, has room for.
SMALLEST_BLOCK_M = 16


def row_tiles(rows: int, experts: int, block_m: int = SMALLEST_BLOCK_M) -> int:
    """The most tiles that rows fall into, a tile being within one expert or the dropped slots."""
    # Two at least, for the list's totals stand beside the first two.
    return rows // block_m + max(experts, 1) + 1
