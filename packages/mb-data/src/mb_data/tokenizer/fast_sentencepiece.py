"""gigatoken, the engine, for SentencePiece's kind of BPE: Llama 2, Mistral, Gemma.

Such a vocabulary merges letters, spaces written as ``▁`` among them, across whole texts, and spells
letters it does not have by their bytes. The library that the file belongs to is still needed: it
checks the first tokens of one document in each block, and encodes what the engine cannot.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # kinds of pieces in a SentencePiece model

# What both must agree on before the engine is used: dummy prefixes, runs of spaces, bytes,
# normalization, user-defined symbols.
PROBES = (
    "Hello world, it's  2026!\n\n  x = y[12345] ** 2\t# ok",
    " a", "  a ", "a  b   c    d     e", "\n", "\n\n\n\n a", "\t\tif x:\n\t\t\treturn", "",
    "Grüße, 你好世界, привет мир, e\u0301 é ½ ② ﬁ \uff21\u3000\u00a0\u200b\ufeff", "\x00\x01\x7f",
    "<s> </s> <unk> <0x0A> <pad> [INST] <mask> ▁ ▁▁", "🙂👩‍👩‍👧 \U0002f800 \U0010fffd",
    "unbelievably " * 20, "12345678901234567890", "</s>a<s>", "<h1>x</h1><table>",
    f"x{' ' * 100}y{' ' * 33}", "\n" * 70 + "\t" * 70, f"{' ' * 31}z{' ' * 32}",
)  # fmt: skip


class FastSentencePiece:
    """Tokens of texts through gigatoken.

    Args:
        description: a tokenizer.json's content, of BPE with byte fallback.
        careful: a text that this matches is left to the library.
        library: the same tokens from the library the file belongs to.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
        RuntimeError: the engine cannot read the description, or differs from the library.
    """

    def __init__(
        self,
        description: dict[str, Any],
        careful: str | None = None,
        *,
        library: Callable[[str], list[int]],
    ) -> None:
        if description["model"].get("ignore_merges"):
            raise RuntimeError("takes words that are entries whole, which the engine merges")
        self._data = json.dumps(description, ensure_ascii=False)
        self._library = library
        self._careful = re.compile(careful.encode()) if careful else None
        self._engine = self._load()
        for text in PROBES:
            if self.encode(text.encode()).tolist() != library(text):
                raise RuntimeError(f"the engine differs from the library on {text!r}")

    def encode(self, text: bytes) -> npt.NDArray[np.uint32]:
        if not text:
            return np.zeros(0, dtype=np.uint32)
        if self._careful and self._careful.search(text):
            return np.array(self._library(text.decode()), dtype=np.uint32)
        return self._engine.encode(text)

    def encode_documents(
        self, texts: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of all texts [n] in one array, and their counts."""
        rows = [self.encode(text) for text in texts]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return np.concatenate([np.zeros(0, np.uint32), *rows]), lengths

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        """The library's first tokens; None if both agree on a text that is longer than that.

        Merges know no words, so a cut text's last tokens may not be those of the whole.
        """
        start = text[:letters]
        expected = self._library(start)
        if len(text) > letters and self.encode(start.encode()).tolist() == expected:
            return None
        return expected

    def forget(self) -> None:
        self._engine = self._load()  # in one go: other threads may encode

    def _load(self) -> Any:
        from gigatoken.gigatoken_rs import SentencePieceTokenizer, load_hf_json

        engine = load_hf_json(self._data)
        if not isinstance(engine, SentencePieceTokenizer):
            raise RuntimeError("byte-level BPE, not SentencePiece's")
        return engine


def model_description(model: bytes) -> tuple[dict[str, Any], str | None]:
    """The tokenizer.json of a SentencePiece model file of BPE, and a pattern of texts on which it
    would differ from the library.

    A file is a protocol buffer: pieces in field 1 (text 1, score 2, kind 3), how it was trained in
    field 2 (its kind of model 3, byte fallback 35), how it normalizes in field 3.

    Raises RuntimeError for other models.
    """
    fields = list(_fields(model))
    pieces = [dict(_fields(value)) for field, value in fields if field == 1]
    trained = dict(pair for field, value in fields if field == 2 for pair in _fields(value))
    normalizes = dict(pair for field, value in fields if field == 3 for pair in _fields(value))
    if trained.get(3, 1) != 2 or not trained.get(35, 0) or trained.get(24, 0):
        raise RuntimeError("not BPE with byte fallback and spaces in front")
    if normalizes.get(2) or normalizes.get(4, 1) or not normalizes.get(5, 1):
        raise RuntimeError("normalizes the text, or drops its white space")
    texts = [piece.get(1, b"").decode() for piece in pieces]
    kinds = [piece.get(3, NORMAL) for piece in pieces]
    scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges: list[tuple[float, int, int, str, str]] = []
    for i, text in enumerate(texts):
        if kinds[i] in (NORMAL, USER_DEFINED):
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-scores[i], i, -cut, left, right))
    merges.sort()
    prefix = [{"type": "Prepend", "prepend": "▁"}] if normalizes.get(3, 1) else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    defined = [t for t, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED]
    marks, careful = _user_defined(defined, vocabulary, prefixed=bool(prefix))
    added = [
        {"id": vocabulary[text], "content": text, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text in marks
    ]
    description = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "model": {
            "type": "BPE",
            "unk_token": next(t for t, kind in zip(texts, kinds, strict=True) if kind == UNKNOWN),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": [[left, right] for *_, left, right in merges],
        },
    }
    return description, "|".join(careful) or None


def _user_defined(
    defined: Sequence[str], vocabulary: Mapping[str, int], *, prefixed: bool
) -> tuple[list[str], list[str]]:
    """Of the pieces that users defined, those to look for in a text before it is normalized, and
    patterns of texts to leave to the library. Control pieces are never text.

    What users defined is a piece wherever it stands in a normalized text. Before that, a space of
    it is another letter, and a text that begins with it would get no space in front. Runs of white
    space come out of the merges, first of all, for their score is 0: if all shorter ones are there,
    up to one that is longer than any piece, which the library cuts from the left, merges in the
    middle.
    """
    marks: list[str] = []
    careful: list[str] = []
    lengths: dict[str, set[int]] = {}
    for text in defined:
        if text[0] in "▁\t\n\r" and not text.strip(text[0]):
            lengths.setdefault(text[0], set()).add(len(text))
    merged = {
        sign: max(found)
        for sign, found in lengths.items()
        if sign in vocabulary and found | {1} == set(range(1, max(found) + 1))
    }
    for text in defined:
        if text[0] in merged and not text.strip(text[0]):
            continue
        if not prefixed and "▁" not in text and " " not in text:
            marks.append(text)
            continue
        careful.append(_spaced(text))
        if prefixed and text[0] == "▁":
            careful.append(rf"\A{_spaced(text[1:])}")
    for sign, longest in merged.items():
        letter = " " if sign == "▁" else sign
        if longest > 1:
            careful.append(f"{letter}{{{longest + 1},}}")
        if sign == "▁":
            careful += ["▁", rf"\A {{{longest},}}"] if prefixed else ["▁"]
    return marks, careful


def _spaced(text: str) -> str:
    """A pattern of a text, whose spaces may be written as the library writes them."""
    return "(?: |▁)".join(map(re.escape, re.split("[ ▁]", text)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer: integers, or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: 0, 5: 4}.get(key & 7)
        if size is None:
            raise RuntimeError("not a SentencePiece model")
        size = size or varint()
        yield key >> 3, data[place : place + size]
        place += size
