"""Short samples laid one behind the other into sequences.

Next fit: a sequence takes the samples that come next in the data's order as long as they fit, so
the order of samples, and with it what a run has seen at any step, stays that of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mb_data
import numpy as np
import numpy.typing as npt

from mb_train.tasks.base import Dataset, Datasets


class PackedSamples:
    """Sequences of one or several samples each: `self[i]` is a list of a dataset's items.

    Args:
        dataset: the samples.
        lengths: [samples, streams]: tokens of each sample in each stream (a T5 has two), or more.
        rooms: tokens of a sequence in each stream; no sample has more.
        most: samples of a sequence at most.
    """

    def __init__(
        self,
        dataset: Dataset,
        lengths: npt.NDArray[np.integer],
        *,
        rooms: Sequence[int],
        most: int,
    ) -> None:
        self.dataset = dataset
        starts, left, held = [], [0] * len(rooms), most
        for sample, taken in enumerate(lengths.tolist()):
            left = [room - length for room, length in zip(left, taken, strict=True)]
            if min(left) < 0 or held == most:
                starts.append(sample)
                left = [room - length for room, length in zip(rooms, taken, strict=True)]
                held = 0
            held += 1
        self._starts = np.array([*starts, len(lengths)], np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start, end = self._starts[index : index + 2].tolist()
        return [self.dataset[sample] for sample in range(start, end)]


def pack(
    build: Callable[[Sequence[int]], Datasets],
    num_samples: tuple[int, int, int],
    *,
    rooms: Sequence[int],
    most: int,
) -> Datasets:
    """Training, validation and test set of sequences that samples are packed into.

    Args:
        build: makes the sets of samples, at least so many in each.
        num_samples: sequences that each must have.
        rooms, most: see `PackedSamples`; a `most` of 1 leaves samples as they are.
    """
    if most == 1:
        return build(num_samples)
    wanted = list(num_samples)
    while True:
        train, valid, test = (
            None
            if part is None
            else PackedSamples(part, sample_lengths(part), rooms=rooms, most=most)
            for part in build(wanted)
        )
        counts = [math.inf if part is None else len(part) for part in (train, valid, test)]
        few = [part for part in range(3) if counts[part] < num_samples[part]]
        if not few:
            return train, valid, test
        for part in few:
            wanted[part] = more_samples(wanted[part], int(counts[part]), num_samples[part])


def sample_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """[samples, streams] tokens of each sample of a BERT's or a T5's dataset, or of a blend."""
    if isinstance(dataset, mb_data.BlendedDataset):
        parts = [sample_lengths(source) for source in dataset.datasets]
        lengths = np.empty((len(dataset), parts[0].shape[1]), np.int64)
        for number, part in enumerate(parts):
            own = dataset.dataset_index == number
            lengths[own] = part[dataset.dataset_sample_index[own]]
        return lengths
    assert isinstance(dataset, (mb_data.BertDataset, mb_data.T5Dataset))
    return dataset.lengths()


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
