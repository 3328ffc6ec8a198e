"""When a run has diverged: the rule to stop by, and where to look.

A loss that is not a number seldom recovers. After `limit` such steps in a row the run stops and
names the documents of the first bad batch, which is where damaged text shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mb_data import FillInTheMiddle

_NAMED = 8


class DivergenceGuard:
    """Counts steps in a row whose loss is not finite.

    Args:
        limit: stop after this many; 0 never stops.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bad = 0
        self.since: int | None = None

    def see(self, losses: Sequence[float], last_iteration: int) -> bool:
        """Take the losses of the steps up to `last_iteration`; whether to stop.

        Every rank must give the same losses, as `Accumulator.collect` returns them.
        """
        for iteration, loss in enumerate(losses, last_iteration - len(losses) + 1):
            if math.isfinite(loss):
                self.bad, self.since = 0, None
                continue
            self.bad += 1
            self.since = iteration if self.since is None else self.since
            if self.limit and self.bad >= self.limit:
                return True
        return False

    def reason(self, dataset: Any, samples: Sequence[int]) -> str:
        """Why the run stops, in words: since when, and which documents that batch held.

        Args:
            dataset: the training set.
            samples: of it, those of the step `since`.
        """
        named = documents_of(dataset, samples)
        return (
            f"the loss is not a number since iteration {self.since} ({self.bad} steps in a row). "
            f"Documents of that batch: {named}"
        )


def documents_of(dataset: Any, samples: Sequence[int]) -> str:
    """The documents that samples of a GPT dataset, or a blend of such, are cut from, in words.

    Of another dataset the samples themselves are named.
    """
    found: dict[str, list[int]] = {}
    dataset = dataset.dataset if isinstance(dataset, FillInTheMiddle) else dataset
    for sample in samples:
        source, index = dataset, sample
        while hasattr(source, "dataset_sample_index"):
            number = int(source.dataset_index[index])
            index = int(source.dataset_sample_index[index])
            source = source.datasets[number]
        if not hasattr(source, "sample_idx"):
            return f"unknown, samples {_some(samples)}"
        row = int(source.shuffle_idx[index])
        first, last = int(source.sample_idx[row][0]), int(source.sample_idx[row + 1][0])
        documents = found.setdefault(str(source.indexed.prefix), [])
        documents.extend(int(d) for d in source.doc_idx[first : last + 1] if d not in documents)
    return "; ".join(f"{_some(documents)} of {prefix}.bin" for prefix, documents in found.items())


def _some(numbers: Sequence[int]) -> str:
    more = len(numbers) - _NAMED
    return ", ".join(map(str, numbers[:_NAMED])) + (f" and {more} more" if more > 0 else "")
