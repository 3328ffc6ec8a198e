"""Short samples laid one behind the other into sequences.

Next fit: a sequence takes the samples that come next in the data's order as long as they fit, so
the order of samples, and with it what a run has seen at any step, stays that of the data.
"""

from __future__ import annotations

import math
from typing import Any

import mb_data
import numpy as np
import numpy.typing as npt

from mb_train.tasks.base import Dataset


class PackedSamples:
    """Sequences of one or several samples each: `self[i]` is a list of a dataset's items.

    Args:
        dataset: the samples.
        lengths: tokens of each sample, or more; none is longer than `room`.
        room: tokens of a sequence.
        most: samples of a sequence at most.
    """

    def __init__(
        self, dataset: Dataset, lengths: npt.NDArray[np.integer], *, room: int, most: int
    ) -> None:
        self.dataset = dataset
        starts, used, held = [], room, 0
        for sample, length in enumerate(lengths.tolist()):
            if used + length > room or held == most:
                starts.append(sample)
                used = held = 0
            used, held = used + length, held + 1
        self._starts = np.array([*starts, len(lengths)], np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start, end = self._starts[index : index + 2].tolist()
        return [self.dataset[sample] for sample in range(start, end)]


def bert_lengths(dataset: Dataset) -> npt.NDArray[np.int64]:
    """Tokens of each sample of a BERT's dataset, special ones included: without reading a sample.

    Args:
        dataset: an `mb_data.BertDataset`, or a blend of some.
    """
    if isinstance(dataset, mb_data.BlendedDataset):
        lengths = np.empty(len(dataset), np.int64)
        for number, source in enumerate(dataset.datasets):
            own = dataset.dataset_index == number
            lengths[own] = bert_lengths(source)[dataset.dataset_sample_index[own]]
        return lengths
    assert isinstance(dataset, mb_data.BertDataset)
    first, end, target = np.asarray(dataset.mapping, np.int64).T
    before = np.concatenate([[0], np.cumsum(dataset.indexed.sizes, dtype=np.int64)])
    special = 2 + dataset.binary_head  # [CLS], and [SEP] behind each segment
    return np.minimum(before[end] - before[first], target) + special


def more_samples(samples: int, found: int, wanted: int) -> int:
    """How many samples to pack, where `samples` made `found` sequences instead of `wanted`."""
    return math.ceil(1.02 * samples * wanted / max(found, 1)) + 1
