"""When a run has diverged: the rule to stop by, and where to look.

A loss that is not a number seldom recovers, and while gradients are none nothing changes that
could. After `limit` such steps in a row the run stops and names the documents of the first bad
batch, which is where damaged text shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mb_train.data.documents import documents_of
from mb_train.words import counted


class DivergenceGuard:
    """Counts steps in a row whose loss or gradients are not finite.

    Args:
        limit: stop after this many; 0 never stops.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bad = 0
        self.since: int | None = None
        self._no_loss = False  # in any of these steps

    def see(self, losses: Sequence[float], stuck: Sequence[bool], last_iteration: int) -> bool:
        """Take the steps up to `last_iteration`; whether to stop.

        Every rank must give the same, as `Accumulator.collect` returns it.

        Args:
            losses: one per step.
            stuck: whether its update was skipped, and not in search of a loss scale.
        """
        first = last_iteration - len(losses) + 1
        for iteration, (loss, skipped) in enumerate(zip(losses, stuck, strict=True), first):
            lost = not math.isfinite(loss)
            if not (lost or skipped):
                self.bad, self.since, self._no_loss = 0, None, False
                continue
            self.bad += 1
            self.since = iteration if self.since is None else self.since
            self._no_loss |= lost
            if self.limit and self.bad >= self.limit:
                return True
        return False

    def reason(self, dataset: Any, samples: Sequence[int]) -> str:
        """Why the run stops, in words: since when, and which documents that batch held.

        Args:
            dataset: the training set.
            samples: of it, those of the step `since`.
        """
        what = "the loss is not a number" if self._no_loss else "no gradient norm is finite"
        named = documents_of(dataset, samples)
        reason = (
            f"{what} since iteration {self.since} ({counted(self.bad, 'step')} in a row). "
            f"Documents of that batch: {named}"
        )
        if self._no_loss:
            return reason
        return (
            f"{reason}. The loss is finite and the weights did not change: look for an overflow in "
            "the backward pass, of a loss scale that is too high, of fp16 (--bf16 has fp32's "
            "range) or of an operation of your own"
        )
