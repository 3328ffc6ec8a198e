"""A tokenizer for text that consists of ids already: Megatron's NullTokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer, checked_ids


class NullTokenizer(Tokenizer):
    """Text that is token ids already, separated by white space; ``eod`` is one more id.

    Raises ValueError for a size below 1 or of 2**32, and in ``encode`` for what is no id.
    """

    def __init__(self, name: str, size: int) -> None:
        if not 1 <= size < 2**32:  # tokens are 32 bits wide on their way to the disk
            raise ValueError(f"{name}: the vocabulary must have 1 to 2**32 - 1 ids, got {size}")
        self.name = name
        self.fingerprint = name
        self.special = {"eod": size}
        self.vocab_size = size + 1

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size - 1):
                raise ValueError(
                    f"{word[:20]!r} is not an id: a number from 0 to {self.vocab_size - 2}"
                )
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return " ".join(map(str, checked_ids(ids, self)))
