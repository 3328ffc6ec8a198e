"""Datasets and batches of several short samples in a sequence: see `mb_data.PackedSamples`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mb_data
import numpy as np
import numpy.typing as npt

from mb_train.tasks.base import Datasets, Wanted


def pack(
    build: Callable[[Wanted], tuple[Any, Any, Any]],
    num_samples: Wanted,
    *,
    rooms: Sequence[int],
    most: int,
) -> Datasets:
    """Training, validation and test set of sequences that samples are packed into.

    Args:
        build: makes the sets of samples, at least so many in each, which know their `lengths()`.
        num_samples: sequences that each must have; None for a set that is not wanted.
        rooms, most: see `mb_data.PackedSamples`; a `most` of 1 leaves samples as they are.
    """
    if most == 1:
        return build(num_samples)
    wanted: list[Any] = list(num_samples)
    while True:
        train, valid, test = (
            None
            if part is None
            else mb_data.PackedSamples(part, part.lengths(), rooms=rooms, most=most)
            for part in build(wanted)
        )
        counts = [math.inf if part is None else len(part) for part in (train, valid, test)]
        few = [part for part in range(3) if counts[part] < (num_samples[part] or 0)]
        if not few:
            return train, valid, test
        for part in few:
            wanted[part] = more_samples(wanted[part], int(counts[part]), num_samples[part] or 0)


def row_of(sample: Any) -> list[Any]:
    """The samples of a sequence: of a packed dataset several, of another the one that it is."""
    return sample if isinstance(sample, list) else [sample]


def lengths_of(rows: list[list[Any]], valid: str, most: int) -> npt.NDArray[np.int64]:
    """[B, P] tokens of each sample of each sequence, 0 where it has fewer than P = `most`.

    Args:
        valid: the entry of a sample that is 1 for tokens and 0 for the padding behind them.
    """
    lengths_BP = np.zeros((len(rows), most), np.int64)
    for lengths_P, row in zip(lengths_BP, rows, strict=True):
        lengths_P[: len(row)] = [np.sum(sample[valid]) for sample in row]
    return lengths_BP


def laid(rows: list[list[Any]], name: str, valid: str) -> npt.NDArray[np.int64]:
    """[B, S]: one entry of samples, those of a sequence without their padding but the last."""

    def in_a_row(samples: list[Any]) -> npt.NDArray[np.int64]:
        parts = [sample[name][: np.sum(sample[valid])] for sample in samples[:-1]]
        last = samples[-1][name]
        return np.concatenate([*parts, last])[: len(last)].astype(np.int64)

    return np.stack([in_a_row(row) for row in rows])


def more_samples(samples: int, found: int, wanted: int) -> int:
    """How many samples to pack, where `samples` made `found` sequences instead of `wanted`."""
    return math.ceil(1.02 * samples * wanted / max(found, 1)) + 1
