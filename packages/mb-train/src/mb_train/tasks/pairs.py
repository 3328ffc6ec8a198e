"""Pairs of sentences with a label, from the TSV files of MNLI and QQP.

A file's first line names its columns and is passed over. MNLI (Williams et al., 2018) has the two
sentences in its 9th and 10th column and the label in its last; QQP, Quora's questions, in its 4th,
5th and 6th.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Form(NamedTuple):
    """Columns of the two sentences and of the label, how many there are at least, the classes."""

    first: int
    second: int
    label: int
    columns: int
    classes: tuple[str, ...]


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "mnli": Form(8, 9, -1, 11, ("contradiction", "entailment", "neutral")),
        "qqp": Form(3, 4, 5, 6, ("0", "1")),
    }
)


class Pair(NamedTuple):
    """Two sentences and the number of their class."""

    first: str
    second: str
    label: int


def read_pairs(path: Path, task: str) -> list[Pair]:
    """All pairs of a file.

    Raises:
        ValueError: a line with too few columns or an unknown label, named by its number; no pair.
        OSError: a file that cannot be read.
    """
    form, pairs = FORMS[task], []
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected {path} to be text in UTF-8: {error}.") from None
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = line.rstrip("\r").split("\t")
        if len(row) < form.columns:
            raise ValueError(
                f"{path}, line {number}: expected at least {form.columns} columns of {task}, got "
                f"{len(row)}."
            )
        label = row[form.label].strip()
        if label not in form.classes:
            raise ValueError(
                f"{path}, line {number}: expected a label of {', '.join(form.classes)}, got "
                f"{label!r}."
            )
        pairs.append(Pair(row[form.first], row[form.second], form.classes.index(label)))
    if not pairs:
        raise ValueError(f"Expected pairs of sentences below the first line of {path}, got none.")
    return pairs


class PairDataset:
    """Samples `[CLS] first [SEP] second [SEP]` with padding, as a BERT's.

    Args:
        pairs: what there is.
        tokenizer: with [CLS], [SEP] and [PAD].
        seq_length: S; what is longer loses the ends of its longer sentence.
        num_samples: how many at least: the pairs come again and again.
        seed: of another order each time; None keeps theirs.

    Raises:
        ValueError: sequences too short for [CLS] and two [SEP].
    """

    def __init__(
        self,
        pairs: list[Pair],
        tokenizer: Any,
        *,
        seq_length: int,
        num_samples: int = 0,
        seed: int | None = None,
    ) -> None:
        if seq_length < 3:
            raise ValueError(
                f"Expected --seq-length of at least 3, for [CLS] and two [SEP], got {seq_length}."
            )
        self.pairs, self._tokenizer, self._length = pairs, tokenizer, seq_length
        self._samples = max(num_samples, len(pairs))
        self._order = lru_cache(4)(lambda turn: self._shuffled(seed, turn))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        turn, place = divmod(index, len(self.pairs))
        pair, tokenizer = self.pairs[int(self._order(turn)[place])], self._tokenizer
        a, b = (list(tokenizer.encode(text)) for text in (pair.first, pair.second))
        while len(a) + len(b) > self._length - 3:
            (a if len(a) > len(b) else b).pop()
        tokens = [tokenizer.cls, *a, tokenizer.sep, *b, tokenizer.sep]
        text = np.full(self._length, tokenizer.pad, np.int64)
        types, valid = np.zeros((2, self._length), np.int64)
        text[: len(tokens)], valid[: len(tokens)] = tokens, 1
        types[len(a) + 2 : len(tokens)] = 1
        return {"text": text, "types": types, "padding_mask": valid, "label": pair.label}

    def _shuffled(self, seed: int | None, turn: int) -> np.ndarray:
        if seed is None:
            return np.arange(len(self.pairs))
        return np.random.default_rng((seed, turn)).permutation(len(self.pairs))
