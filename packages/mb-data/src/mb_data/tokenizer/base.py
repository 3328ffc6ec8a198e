"""What every tokenizer here offers, and the rule for padding a vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_IDS = 1 << 24  # the largest vocabularies have 2 ** 18; these need a GB


class Tokenizer(ABC):
    """Text to token ids and back.

    Text is never trusted: a document that contains ``<|endoftext|>``, or any other special token,
    gets the ids of those characters, as in Megatron. Special tokens are placed by code alone,
    through ``special`` and the properties below.

    Attributes:
        name: what ``load_tokenizer`` was given.
        fingerprint: changes with anything that changes the ids; resumed runs compare it.
        vocab_size: number of ids, special and extra ones included, before padding.
        special: ids of the special tokens by role: ``eod bos eos cls sep mask pad``, those there.
        extra_ids: ids of ``<extra_id_0>``, ``<extra_id_1>``, …; T5's sentinels.
        prepend_bos: whether documents begin with ``bos`` unless one says otherwise (Megatron's
            Llama2Tokenizer, and its HuggingFaceTokenizer where the file says so).
        begins_with: id of the one token that the file puts around a text, in front of it, if any.
        careful_documents: how many documents the slow, readable implementation has encoded so far,
            because the engine's Unicode tables might be of another year.
    """

    name: str
    fingerprint: str
    vocab_size: int
    special: dict[str, int]
    extra_ids: tuple[int, ...] = ()
    prepend_bos: bool = False
    begins_with: int | None = None
    careful_documents: int = 0
    rebuild: Callable[[], Tokenizer] | None = None  # makes an equal one, in another process

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text; raises ValueError for text that is not valid Unicode."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text of some ids; bytes that are not UTF-8, as from a cut token, become U+FFFD.

        An id in a gap of the vocabulary is no text; ValueError for one outside it.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def encode_documents(
        self, texts: Sequence[bytes], *, append_eod: bool = False
    ) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """Encode valid UTF-8 in bulk: tokens of all texts [n] in one array, and their counts.

        ``append_eod`` ends each text with ``eod``, except one without any token.
        """
        rows = self.encode_batch([text.decode() for text in texts])
        if append_eod:
            rows = [[*row, self.eod] if row else row for row in rows]
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        flat = (token for row in rows for token in row)
        return np.fromiter(flat, dtype=np.uint32, count=int(lengths.sum())), lengths

    def prepare(self) -> None:
        """Load what encoding needs, as before a fork; the first text does so otherwise."""
        return

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        """First tokens of a text, by an implementation independent of ``encode``.

        Those of about the first ``letters`` letters; all, if the text is no longer than that. None
        if this tokenizer has no second implementation.
        """
        return None

    def forget(self) -> None:
        """Free what an engine remembers of the text it has seen; the ids stay the same."""
        return

    def word_starts(self) -> npt.NDArray[np.bool_]:
        """[vocab_size], True for ids that begin a word; all, where the vocabulary does not say."""
        return np.ones(self.vocab_size, dtype=bool)

    def token_id(self, text: str) -> int | None:
        """Id of the token that this special text names, None if there is none."""
        return None

    def special_id(self, role: str) -> int:
        """Id of the special token in a role; ValueError if this vocabulary has none."""
        if role not in self.special:
            hint = "; eod_token (mb-data preprocess --eod-token) names one" * (role == "eod")
            raise ValueError(
                f"tokenizer {self.name} has no {role} token; it has: "
                f"{', '.join(self.special) or 'no special tokens'}{hint}"
            )
        return self.special[role]

    @property
    def eod(self) -> int:
        """End of document."""
        return self.special_id("eod")

    @property
    def bos(self) -> int:
        """Beginning of sequence."""
        return self.special_id("bos")

    @property
    def eos(self) -> int:
        """End of sequence."""
        return self.special_id("eos")

    @property
    def cls(self) -> int:
        """First token of a BERT sample."""
        return self.special_id("cls")

    @property
    def sep(self) -> int:
        """Between two segments of a BERT sample."""
        return self.special_id("sep")

    @property
    def mask(self) -> int:
        """In place of a token to predict."""
        return self.special_id("mask")

    @property
    def pad(self) -> int:
        """Fills a sample up to its length."""
        return self.special_id("pad")

    def __reduce__(self) -> tuple[Any, ...]:
        if self.rebuild is None:
            raise TypeError(f"{self!r} cannot be pickled: only what load_tokenizer made can")
        return self.rebuild, ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, vocab_size={self.vocab_size})"


def check_vocabulary(name: str, ids: Iterable[object]) -> None:
    """Raise ValueError for an id that no vocabulary has: engines and models take memory for all
    below it."""
    for i in ids:
        if type(i) is not int or not 0 <= i < MOST_IDS:
            raise ValueError(
                f"{name}: not a vocabulary: expected ids from 0 to {MOST_IDS - 1:,}, got {i!r}"
            )


def padded_vocab_size(vocab_size: int, *, divisible_by: int = 128, tensor_parallel: int = 1) -> int:
    """Megatron's rule: round up to a multiple of ``divisible_by`` × ``tensor_parallel``.

    50,257 becomes 50,304 by default, 51,200 with ``divisible_by=1024``. Raises ValueError for sizes
    below 1.
    """
    for value in (vocab_size, divisible_by, tensor_parallel):
        if value < 1:
            raise ValueError(f"sizes must be at least 1, got {value}")
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def check_engine(engine: str, name: str, *known: str) -> None:
    """Raise ValueError for an engine that a tokenizer does not have; each knows "auto"."""
    if engine not in ("auto", *known):
        *others, last = ("auto", *known)
        raise ValueError(f"engine {engine!r} for {name}: expected {', '.join(others)} or {last}")


def checked_ids(ids: Sequence[int] | npt.NDArray[np.integer], tokenizer: Tokenizer) -> list[int]:
    """Plain integers, all of the vocabulary."""
    numbers = [int(i) for i in ids]
    for i in numbers:
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(
                f"{tokenizer.name}: token {i} is not in 0 to {tokenizer.vocab_size - 1}"
            )
    return numbers
