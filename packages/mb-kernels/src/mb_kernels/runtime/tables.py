"""Tables for kernels that take hundreds of tensors in one launch.

There is a row for each tensor. Its columns are addresses and whatever else the kernel looks up; the
last is the number of programs up to and including this tensor's, for ``language.tables.find``.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mb_kernels.runtime.launch import cdiv, power_of_two

TENSORS = 512  # in one launch, at most
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Entry(NamedTuple):
    """One tensor, with those of its shape that go with it: a row of the table to be."""

    dtypes: tuple[torch.dtype | None, ...]  # that the kernel is compiled for
    addresses: list[int]
    numbers: int  # in each of them
    more: tuple[int, ...] = ()  # columns behind addresses and numbers


class Batch(NamedTuple):
    """What one launch serves."""

    types: tuple[Any, ...]  # Triton's, of the entries' dtypes
    is_aligned: bool
    table: Tensor
    programs: int


def batches(entries: Iterable[Entry], numbers: int, device: torch.device) -> Iterator[Batch]:
    """Entries by what a kernel is compiled for, within that in their order; empty ones left out.

    Args:
        numbers: of a tensor, that a program takes.
    """
    alike: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        if entry.numbers:
            key = entry.dtypes, _aligned([*entry.addresses, entry.numbers])
            alike.setdefault(key, []).append(entry)
    for (dtypes, is_aligned), those in alike.items():
        types = tuple(None if dtype is None else TYPES[dtype] for dtype in dtypes)
        for begin in range(0, len(those), TENSORS):
            some = those[begin : begin + TENSORS]
            rows = [[*entry.addresses, entry.numbers, *entry.more] for entry in some]
            programs = [cdiv(entry.numbers, numbers) for entry in some]
            yield Batch(types, is_aligned, table(rows, programs, device), sum(programs))


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


def _aligned(numbers: Sequence[int]) -> bool:
    """Whether 16 divides all addresses and sizes, so that threads may move 16 bytes at a time."""
    return not any(number % 16 for number in numbers)
