"""Fill-in-the-middle: documents cut in three and laid out so that the middle comes last.

A model that is trained so learns to write what belongs between two pieces of text (Bavarian et al.
2022, "Efficient Training of Language Models to Fill in the Middle", arXiv:2207.14255). Each
document of a packed sample is changed with probability ``rate``, into one of two forms:

- prefix, suffix, middle: ``<prefix> a <suffix> c <middle> b``;
- suffix first: ``<prefix> <suffix> c <middle> a b``, with probability ``suffix_first_rate``.

Cuts fall between tokens, where Megatron's fall between characters: nothing is decoded, and a sample
costs a few microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.blend import Samples


class MiddleTokens(NamedTuple):
    """Ids of the tokens that mark the three parts."""

    prefix: int
    middle: int
    suffix: int


class FillInTheMiddle:
    """The samples of a dataset, their documents rearranged.

    Three marks make a sample longer; what then exceeds its length is cut off at its end.

    Args:
        dataset: samples of int64 [S + 1], documents ended by ``eod``.
        marks: ids of the marks.
        eod: the end-of-document token.
        rate: share of the documents that are changed.
        suffix_first_rate: share of those that take the second form.
        seed: with the number of a sample, decides all that is drawn for it.

    Raises:
        ValueError: a rate outside 0 to 1, or marks that are not four different tokens with eod.
    """

    def __init__(
        self,
        dataset: Samples[npt.NDArray[np.int64]],
        marks: MiddleTokens,
        *,
        eod: int,
        rate: float = 0.5,
        suffix_first_rate: float = 0.5,
        seed: int,
    ) -> None:
        for name, value in (("rate", rate), ("suffix_first_rate", suffix_first_rate)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}")
        if len({*marks, eod}) < 4:
            raise ValueError(f"marks and eod must be four different tokens, got {marks}, {eod}")
        self.dataset = dataset
        self.marks = marks
        self.eod = eod
        self.rate = rate
        self.suffix_first_rate = suffix_first_rate
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index``: int64 [S + 1]. A function of the index and the seed alone."""
        sample = self.dataset[index]
        rng = np.random.default_rng((self.seed, index % len(self)))
        ends = np.flatnonzero(sample == self.eod)
        parts: list[npt.NDArray[np.int64]] = []
        for document in np.split(sample, ends + 1):
            closed = len(document) > 0 and document[-1] == self.eod
            text = document[:-1] if closed else document
            if len(text) and rng.random() < self.rate:
                text = self._rearranged(text, rng)
            parts += [text, document[-1:]] if closed else [text]
        return np.concatenate(parts)[: len(sample)]

    def _rearranged(
        self, text: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        low, high = sorted(rng.integers(0, len(text) + 1, size=2).tolist())
        a, b, c = text[:low], text[low:high], text[high:]
        prefix, middle, suffix = ([mark] for mark in self.marks)
        if rng.random() < self.suffix_first_rate:
            return np.concatenate((prefix, suffix, c, middle, a, b)).astype(np.int64)
        return np.concatenate((prefix, a, suffix, c, middle, b)).astype(np.int64)
