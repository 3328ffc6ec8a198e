"""Texts in two parts with a label, as a BERT reads them: `[CLS] first [SEP] second [SEP]`."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Example(NamedTuple):
    """The two parts of one text, and its class; or of a text for each choice, and the right one."""

    texts: tuple[tuple[str, str], ...]
    label: int


def lines_of(path: Path) -> list[str]:
    """The lines of a text file, without the mark that some editors begin files with.

    Raises:
        ValueError: it is not in UTF-8.
        OSError: it cannot be read.
    """
    try:
        return path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"Expected {path} to be text in UTF-8: {error}.") from None


class ExampleDataset:
    """Samples of N texts each, [N, S] with padding, and the weight that each has in a mean.

    An evaluation takes whole batches; examples that fill up the last one, seen before, weigh 0.

    Args:
        examples: what there is.
        tokenizer: with [CLS], [SEP] and [PAD].
        seq_length: S; what is longer is cut.
        first_at_most: tokens of a first part, behind which the second has what is left. None: the
            longer part loses its end, token by token.
        num_samples: how many at least: the examples come again and again.
        seed: of another order each time; None keeps theirs.

    Raises:
        ValueError: sequences too short for [CLS] and two [SEP].
    """

    def __init__(
        self,
        examples: list[Example],
        tokenizer: Any,
        *,
        seq_length: int,
        first_at_most: int | None = None,
        num_samples: int = 0,
        seed: int | None = None,
    ) -> None:
        if seq_length < 3:
            raise ValueError(
                f"Expected --seq-length of at least 3, for [CLS] and two [SEP], got {seq_length}."
            )
        self.examples, self._tokenizer, self._length = examples, tokenizer, seq_length
        self._first_at_most, self._fills_up = first_at_most, seed is None
        self._samples = max(num_samples, len(examples))
        self._order = lru_cache(4)(lambda turn: self._shuffled(seed, turn))

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        turn, place = divmod(index, len(self.examples))
        example, tokenizer = self.examples[int(self._order(turn)[place])], self._tokenizer
        # All choices of a question have one article.
        encoded = {part: list(tokenizer.encode(part)) for part in set(chain(*example.texts))}
        text = np.full((len(example.texts), self._length), tokenizer.pad, np.int64)
        types, valid = np.zeros((2, *text.shape), np.int64)
        for number, parts in enumerate(example.texts):
            a, b = self._cut(*(encoded[part] for part in parts))
            tokens = [tokenizer.cls, *a, tokenizer.sep, *b, tokenizer.sep]
            text[number, : len(tokens)], valid[number, : len(tokens)] = tokens, 1
            types[number, len(a) + 2 : len(tokens)] = 1
        weight = 0.0 if self._fills_up and turn else 1.0
        found = {"text": text, "types": types, "padding_mask": valid}
        return found | {"label": example.label, "weight": weight}

    def _cut(self, a: list[int], b: list[int]) -> tuple[list[int], list[int]]:
        room = self._length - 3
        if self._first_at_most is not None:
            a = a[: min(self._first_at_most, room)]
            return a, b[: room - len(a)]
        a, b = a[:], b[:]
        while len(a) + len(b) > room:
            (a if len(a) > len(b) else b).pop()
        return a, b

    def _shuffled(self, seed: int | None, turn: int) -> np.ndarray:
        if seed is None:
            return np.arange(len(self.examples))
        return np.random.default_rng((seed, turn)).permutation(len(self.examples))
