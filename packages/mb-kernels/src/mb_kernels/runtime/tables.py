"""Tables for kernels that take hundreds of tensors in one launch.

There is a row for each tensor. Its columns are addresses and whatever else the kernel looks up; the
last is the number of programs up to and including this tensor's, for ``language.tables.find``.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mb_kernels.runtime.launch import power_of_two

TENSORS = 512  # in one launch, at most


def table(rows: Sequence[Sequence[int]], programs: Sequence[int], device: torch.device) -> Tensor:
    """[columns + 1, N] int64 on the device, N a power of two.

    Args:
        rows: one for each of at most ``TENSORS`` tensors, its entry in every column.
        programs: how many each tensor takes.
    """
    filled = [[*row, end] for row, end in zip(rows, itertools.accumulate(programs), strict=True)]
    filled += [[0] * (len(filled[0]) - 1) + [2**62]] * (power_of_two(len(rows)) - len(rows))
    columns = list(zip(*filled, strict=True))
    # From pinned memory the host does not wait for the copy. Pinned memory that a graph's capture
    # copies from is kept by torch for that graph.
    pinned = device.type == "cuda"
    host = torch.tensor(columns, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return host.to(device, non_blocking=True)


def aligned(numbers: Sequence[int]) -> bool:
    """Whether 16 divides all addresses and sizes, so that threads may move 16 bytes at a time."""
    return not any(number % 16 for number in numbers)
