"""Okapi BM25 (Robertson and Zaragoza, 2009): what a learned retriever is measured against.

Letters: Q words of a query, A texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SATURATION, LENGTH_SHARE = 1.2, 0.75  # k1 and b, the customary values


class BM25:
    """Scores texts by the words they share with a query; words are token ids.

    Args:
        texts: each a sequence of token ids.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._count = len(texts)
        lengths_A = np.array([len(text) for text in texts], np.float64)
        self._norm_A = SATURATION * (
            1 - LENGTH_SHARE + LENGTH_SHARE * lengths_A / max(lengths_A.mean(), 1.0)
        )
        self._places: dict[int, list[tuple[int, int]]] = {}
        for number, text in enumerate(texts):
            for token, times in Counter(text).items():
                self._places.setdefault(token, []).append((number, times))

    def scores(self, query: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of every text, [A]; 0 for one that shares nothing with the query."""
        scores_A = np.zeros(self._count)
        for token in query:
            found = self._places.get(token, [])
            weight = math.log1p((self._count - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                scores_A[number] += (
                    weight * times * (SATURATION + 1) / (times + self._norm_A[number])
                )
        return scores_A


def rank_of(scores_A: npt.NDArray[np.floating], right: int) -> int:
    """How many texts do not score below the right one, itself not counted.

    A score that is not a number is below none: a retriever that diverged finds nothing.
    """
    return int((~(scores_A < scores_A[right])).sum()) - 1


def recall(ranks: Sequence[int], k: int) -> float:
    """Share of queries whose text is among the first k."""
    return sum(rank < k for rank in ranks) / max(len(ranks), 1)
