"""WordPiece: BERT's tokenizer (Devlin et al. 2019, arXiv:1810.04805).

Text is cleaned, lower-cased and stripped of accents if the vocabulary is uncased, cut at white
space and punctuation, each CJK ideograph by itself. Each word becomes the longest vocabulary entry
it starts with, the rest of it the longest entry written with ``##``, and so on; a word that cannot
be spelt so becomes ``[UNK]``.

``ReadableWordPiece`` is that in plain Python, twin and fallback; ``WordPiece`` gets the same ids
from the tokenizers library where it is installed.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer, check_engine, checked_ids
from mb_data.tokenizer.disputed import disputed_letters

UNKNOWN = "[UNK]"
CONTINUED = "##"
MAX_WORD_LETTERS = 200  # a longer word is [UNK], as in Megatron
ROLES = {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
ADDED_ROLES = {"bos": "[BOS]", "eos": "[EOS]"}
IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


class ReadableWordPiece:
    """WordPiece in plain Python over a vocabulary of pieces."""

    def __init__(self, ids: Mapping[str, int], *, lower_case: bool) -> None:
        self.ids = ids
        self.lower_case = lower_case
        self.encode_word = lru_cache(maxsize=1 << 16)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        return [token for word in self.words(text) for token in self.encode_word(word)]

    def words(self, text: str) -> list[str]:
        letters = []
        for letter in text:
            kind = _kind(letter)
            if kind == "space":
                letters.append(" ")
            elif kind == "ideograph":
                letters.append(f" {letter} ")
            elif kind != "dropped":
                letters.append(letter)
        cleaned = "".join(letters)
        if self.lower_case:
            decomposed = unicodedata.normalize("NFD", cleaned.lower())
            cleaned = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        spaced = (f" {c} " if _kind(c) == "punctuation" else c for c in cleaned)
        return "".join(spaced).split()

    def _encode_word(self, word: str) -> tuple[int, ...]:
        unknown = (self.ids[UNKNOWN],)
        if len(word) > MAX_WORD_LETTERS:
            return unknown
        tokens: list[int] = []
        start = 0
        while start < len(word):
            prefix = CONTINUED if start else ""
            for end in range(len(word), start, -1):
                token = self.ids.get(prefix + word[start:end])
                if token is not None:
                    break
            else:
                return unknown
            tokens.append(token)
            start = end
        return tuple(tokens)


class WordPiece(Tokenizer):
    """BERT's tokenizer. Ids beyond the vocabulary file's: ``[BOS]``, ``[EOS]``, then extra ids.

    Args:
        name: for messages.
        pieces: the vocabulary file's lines, in order.
        lower_case: whether the vocabulary is uncased.
        num_extra_ids: how many ``<extra_id_i>`` to append.
        engine: "tokenizers", "python", or "auto" for the first that works.

    Raises:
        ValueError: a special token is missing from the vocabulary.
        ModuleNotFoundError: ``engine="tokenizers"`` and it is not installed.
    """

    def __init__(
        self,
        name: str,
        pieces: Sequence[str],
        *,
        fingerprint: str,
        lower_case: bool,
        num_extra_ids: int = 0,
        engine: str = "auto",
    ) -> None:
        check_engine(engine, name, "tokenizers", "python")
        ids = {piece: i for i, piece in enumerate(pieces)}
        for special in (UNKNOWN, *ROLES.values()):
            if special not in ids:
                raise ValueError(f"{name}: {special} is not in the vocabulary")
        self.name = name
        self.fingerprint = f"{fingerprint}, {'uncased' if lower_case else 'cased'}"
        self.readable = ReadableWordPiece(ids, lower_case=lower_case)
        self.pieces = list(pieces)
        self._ids = dict(ids)  # those appended as well
        self.special = {role: ids[piece] for role, piece in ROLES.items()}
        for role, piece in ADDED_ROLES.items():
            self.special[role] = self._add(piece)
        self.extra_ids = tuple(self._add(f"<extra_id_{i}>") for i in range(num_extra_ids))
        self.vocab_size = len(self.pieces)
        self._wanted = engine
        if engine == "tokenizers":
            self.prepare()

    @cached_property
    def _engine(self) -> Any:
        if self._wanted == "python":
            return None
        try:
            return self.load_engine(self.readable.ids, self.readable.lower_case)
        except ModuleNotFoundError:
            if self._wanted == "tokenizers":
                raise
            return None

    def prepare(self) -> None:
        _ = self._engine

    @property
    def engine(self) -> str:
        return "python" if self._engine is None else "tokenizers"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        data = [text.encode() for text in texts]  # half a surrogate pair is an error here too
        if self._engine is None:
            return [self.readable.encode(text) for text in texts]
        careful = set(disputed_letters(wordpiece=True).find(data))
        self.careful_documents += len(careful)
        encodings = iter(
            self._engine.encode_batch_fast(
                [text for i, text in enumerate(texts) if i not in careful],
                add_special_tokens=False,
            )
        )
        return [
            self.readable.encode(text) if i in careful else next(encodings).ids
            for i, text in enumerate(texts)
        ]

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        if self._engine is None:
            return None
        start = text[:letters]
        if len(text) > letters:
            cut = start.rfind(" ")
            start = start[: max(cut, 0)]
        return self.readable.encode(start)

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        words: list[str] = []
        for i in checked_ids(ids, self):
            piece = self.pieces[i]
            if piece.startswith(CONTINUED) and words:
                words[-1] += piece.removeprefix(CONTINUED)
            else:
                words.append(piece)
        return " ".join(words)

    def word_starts(self) -> npt.NDArray[np.bool_]:
        return np.array([not piece.startswith(CONTINUED) for piece in self.pieces])

    def _add(self, piece: str) -> int:
        """The id of a piece that may have to be appended."""
        if piece not in self._ids:
            self._ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self._ids[piece]

    @staticmethod
    def load_engine(ids: Mapping[str, int], lower_case: bool) -> Any:
        from tokenizers import Tokenizer as Engine

        return Engine.from_str(json.dumps(description(ids, lower_case=lower_case)))


def description(ids: Mapping[str, int], *, lower_case: bool) -> dict[str, Any]:
    """The tokenizer.json of a vocabulary: what the tokenizers library has to do for these ids."""
    return {
        "model": {
            "type": "WordPiece",
            "vocab": dict(ids),
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": CONTINUED,
            "max_input_chars_per_word": MAX_WORD_LETTERS,
        },
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": lower_case,
            "lowercase": lower_case,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUED, "cleanup": True},
    }


@lru_cache(maxsize=1 << 16)
def _kind(letter: str) -> str:
    """ "space", "ideograph", "punctuation", "dropped" or "other"."""
    point, category = ord(letter), unicodedata.category(letter)
    if letter in "\t\n\r" or category in ("Zs", "Zl", "Zp"):
        return "space"
    # Letters of private use are kept, as in Megatron; the tokenizers library drops them.
    if point in (0, 0xFFFD) or category in ("Cc", "Cf"):
        return "dropped"
    if any(first <= point <= last for first, last in IDEOGRAPHS):
        return "ideograph"
    # BERT takes every ASCII sign for punctuation, $ and ^ and ~ too.
    if category[0] == "P" or (letter.isascii() and not letter.isalnum() and 32 < point < 127):
        return "punctuation"
    return "other"
