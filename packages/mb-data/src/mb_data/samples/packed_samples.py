"""Short samples laid one behind the other into sequences.

Next fit: a sequence takes the samples that come next in the data's order as long as they fit, so
the order of samples, and with it what a run has seen at any step, stays that of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import checked_index
from mb_data.samples.blend import Samples


class PackedSamples:
    """Sequences of one or several samples each: ``self[i]`` is a list of a dataset's items.

    Args:
        dataset: the samples.
        lengths: [samples, streams]: tokens of each sample in each stream (a T5 has two), or more.
        rooms: tokens of a sequence in each stream; no sample has more.
        most: samples of a sequence at most.
    """

    def __init__(
        self,
        dataset: Samples[Any],
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
        return [self.dataset[sample] for sample in self._samples_of(index)]

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """As the dataset's method of this name; AttributeError where it has none."""
        dataset: Any = self.dataset
        return [found for i in self._samples_of(index) for found in dataset.documents_of(i)]

    def _samples_of(self, index: int) -> range:
        index = checked_index(index, len(self), "sequence", "packed samples")
        return range(*self._starts[index : index + 2].tolist())
