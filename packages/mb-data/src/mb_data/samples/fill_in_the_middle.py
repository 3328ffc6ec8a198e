"""Fill-in-the-middle: documents cut in three and laid out so that the middle comes last.

A model that is trained so learns to write what belongs between two pieces of text (Bavarian et al.
2022, "Efficient Training of Language Models to Fill in the Middle", arXiv:2207.14255). Each
document of a packed sample is changed with probability ``rate``, into one of two forms:

- prefix, suffix, middle: ``<prefix> a <suffix> c <middle> b``;
- suffix first: ``<prefix> <suffix> c <middle> a b``, with probability ``suffix_first_rate``.

A document may be of several fragments, such as the files of a repository, with a token between
them: then ``rate`` decides on the document, and ``fragment_rate`` on each of its fragments.

Cuts are between tokens. Megatron's are between characters; here nothing is decoded, and a sample
costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import checked_index
from mb_data.mersenne import check_seed
from mb_data.samples.blend import Samples


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
        fragment_end: the token between the fragments of a document, if there are such.
        fragment_rate: share of the fragments that are changed, of documents that are.
        leave: of a document's or fragment's tokens, whether to leave them as they are.
        seed: with the number of a sample, decides all that is drawn for it.

    Raises:
        ValueError: a rate outside 0 to 1, or marks that are not different tokens with eod and
            ``fragment_end``.
    """

    def __init__(
        self,
        dataset: Samples[npt.NDArray[np.int64]],
        marks: MiddleTokens,
        *,
        eod: int,
        rate: float = 0.5,
        suffix_first_rate: float = 0.5,
        fragment_end: int | None = None,
        fragment_rate: float = 0.5,
        leave: Callable[[npt.NDArray[np.int64]], bool] | None = None,
        seed: int,
    ) -> None:
        rates = {"rate": rate, "suffix_first_rate": suffix_first_rate}
        for name, value in (rates | {"fragment_rate": fragment_rate}).items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {value}")
        if len({*marks, eod, fragment_end}) < 5:
            raise ValueError(
                "marks, eod and fragment_end must be different tokens, got "
                f"{marks}, {eod}, {fragment_end}"
            )
        self.dataset = dataset
        self.marks = marks
        self.eod = eod
        self.rate = rate
        self.suffix_first_rate = suffix_first_rate
        self.fragment_end = fragment_end
        self.fragment_rate = fragment_rate
        self.leave = leave
        self.seed = check_seed(seed)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample ``index``: int64 [S + 1]. A function of the index and the seed alone."""
        index = checked_index(index, len(self), "sample", "rearranged samples")
        sample = self.dataset[index]
        rng = np.random.default_rng((self.seed, index))
        changed = _each(sample, self.eod, lambda document: self._document(document, rng))
        return changed[: len(sample)]

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """As the dataset's method of this name; AttributeError where it has none."""
        return cast(Any, self.dataset).documents_of(index)

    def _document(
        self, text: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        if rng.random() >= self.rate:
            return text
        if self.fragment_end is None or self.fragment_end not in text:
            return self._rearranged(text, rng)

        def fragment(part: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            return self._rearranged(part, rng) if rng.random() < self.fragment_rate else part

        return _each(text, self.fragment_end, fragment)

    def _rearranged(
        self, text: npt.NDArray[np.int64], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        if self.leave is not None and self.leave(text):
            return text
        low, high = sorted(rng.integers(0, len(text) + 1, size=2).tolist())
        a, b, c = text[:low], text[low:high], text[high:]
        prefix, middle, suffix = ([mark] for mark in self.marks)
        if rng.random() < self.suffix_first_rate:
            return np.concatenate((prefix, suffix, c, middle, a, b)).astype(np.int64)
        return np.concatenate((prefix, a, suffix, c, middle, b)).astype(np.int64)


def _each(
    tokens: npt.NDArray[np.int64],
    end: int,
    change: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    """Change each part between the tokens ``end``, which stay, but for parts without any token."""
    parts: list[npt.NDArray[np.int64]] = []
    for part in np.split(tokens, np.flatnonzero(tokens == end) + 1):
        closed = len(part) > 0 and part[-1] == end
        text = part[:-1] if closed else part
        parts += [change(text) if len(text) else text, part[len(text) :]]
    return np.concatenate(parts)
