"""When a run has diverged: the rule to stop by, and where to look.

A loss that is not a number seldom recovers. After `limit` such steps in a row the run stops and
names the documents of the first bad batch, which is where damaged text shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

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
    """The documents that samples of a dataset are made from, in words.

    Of a dataset that cannot tell, a classifier's, the samples themselves are named.
    """
    if not hasattr(dataset, "documents_of"):
        return f"unknown, samples {_some(samples)}"
    found: dict[str, dict[int, None]] = {}
    for prefix, document in chain.from_iterable(map(dataset.documents_of, samples)):
        found.setdefault(prefix, {})[document] = None
    return "; ".join(
        f"{_some([*documents])} of {prefix}.bin" for prefix, documents in found.items()
    )


def _some(numbers: Sequence[int]) -> str:
    more = len(numbers) - _NAMED
    return ", ".join(map(str, numbers[:_NAMED])) + (f" and {more} more" if more > 0 else "")
