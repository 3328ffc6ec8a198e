"""Byte-level byte-pair encoding: GPT-2's tokenizer and its descendants.

The algorithm (Sennrich, Haddow and Birch 2016, arXiv:1508.07909; on bytes: Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners"): a regular expression cuts the text into
words, each word starts as its bytes, and the adjacent pair that was learnt first is merged until
no pair is left that was learnt.

``ReadableBPE`` is that algorithm, nothing else: it documents, it serves where the engine is not
installed, and every preprocessing run compares the two on a sample. ``ByteLevelBPE`` is what to
use: the same tokens from gigatoken, many times faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Ends a document on its way through the engine, which then needs one call for many documents.
# A document that contains it anyway takes the readable path, so it is no special text.
SEPARATOR = "\x00<mb-data: end of document>\x00"


class ReadableBPE:
    """Byte-level BPE in plain Python.

    Bytes are written as letters, as in the vocabulary files: see ``byte_to_letter``.

    Args:
        ids: the id of every entry of the vocabulary.
        merges: lines ``Ġ t``, in the order they were learnt.
        pattern: regular expression whose matches are the words.
        ignore_merges: a word that is itself in the vocabulary is taken whole (Llama 3).
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        merges: Sequence[str],
        pattern: str = GPT2_PATTERN,
        *,
        ignore_merges: bool = False,
    ) -> None:
        import regex  # here: its tables take a fifth of the package's import time

        self.ids = ids
        self.ranks = dict(zip(merges, range(len(merges)), strict=True))
        self.words = regex.compile(pattern)
        self.ignore_merges = ignore_merges
        self.letters = byte_to_letter()
        self.encode_word = lru_cache(maxsize=1 << 16)(self._encode_word)

    def encode(self, text: str) -> list[int]:
        return [
            token
            for match in self.words.finditer(text)
            for token in self.encode_word(match.group())
        ]

    def encode_start(self, text: str, letters: int) -> list[int]:
        """The first tokens of ``encode(text)``, looking at no more than ``letters`` letters.

        The last two words of a cut text are left out: what follows may change where they end.
        """
        words = [match.group() for match in self.words.finditer(text[:letters])]
        if len(text) > letters:
            words = words[:-2]
        return [token for word in words for token in self.encode_word(word)]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        parts = [self.letters[b] for b in word.encode()]
        if self.ignore_merges and "".join(parts) in self.ids:
            return (self.ids["".join(parts)],)
        never = len(self.ranks)
        while len(parts) > 1:
            ranks = [self.ranks.get(f"{a} {b}", never) for a, b in pairwise(parts)]
            best = min(ranks)
            if best == never:
                break
            # Merge every occurrence of the earliest learnt pair, from the left.
            merged: list[str] = []
            i = 0
            while i < len(parts):
                if i < len(ranks) and ranks[i] == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return tuple([self.ids[part] for part in parts])


class ByteLevelBPE(Tokenizer):
    """Byte-level BPE on gigatoken; on ``ReadableBPE`` where gigatoken cannot be imported.

    Args:
        name: for messages.
        ids: id of every entry, its bytes written as letters; all 256 single bytes must be there.
        merges: lines ``Ġ t``, in the order they were learnt.
        fingerprint: of the vocabulary's files.
        special: ids of special tokens by role.
        special_text: text of special tokens by id, for ``decode``.
        pattern, ignore_merges: see ``ReadableBPE``.
        engine: "gigatoken", "python", or "auto" for the first that works.

    Raises:
        ValueError: a byte is missing from the vocabulary, or a merge makes an unknown entry.
        ModuleNotFoundError: ``engine="gigatoken"`` and it is not installed.
    """

    def __init__(
        self,
        name: str,
        ids: Mapping[str, int],
        merges: Sequence[str],
        *,
        fingerprint: str,
        special: Mapping[str, int],
        special_text: Mapping[int, str],
        extra_ids: Sequence[int] = (),
        pattern: str = GPT2_PATTERN,
        ignore_merges: bool = False,
        engine: str = "auto",
    ) -> None:
        if engine not in ("auto", "gigatoken", "python"):
            raise ValueError(f"engine {engine!r}: expected auto, gigatoken or python")
        letters = byte_to_letter().values()
        unknown = set().union(*ids).difference(letters)
        if unknown:
            entry = next(entry for entry in ids if not unknown.isdisjoint(entry))
            raise ValueError(f"{name}: a letter of entry {entry!r} stands for no byte")
        missing = [byte for byte, letter in byte_to_letter().items() if letter not in ids]
        if missing:
            raise ValueError(f"{name}: byte {missing[0]:#04x} is not in the vocabulary")
        for merge in merges:
            if merge.replace(" ", "") not in ids:
                raise ValueError(f"{name}: merge {merge!r} makes no entry of the vocabulary")
        self.name = name
        self.fingerprint = fingerprint
        self.special = dict(special)
        self.extra_ids = tuple(extra_ids)
        self.readable = ReadableBPE(ids, merges, pattern, ignore_merges=ignore_merges)
        self.special_text = dict(special_text)
        self.vocab_size = max([*ids.values(), *self.special_text, *self.extra_ids]) + 1
        eod = self.special.get("eod")
        # The end of document itself, if it is not an ordinary entry too: that saves a pass.
        self._separator = eod if eod in self.special_text else self.vocab_size
        self._engine: BPETokenizer | None = None
        if engine != "python":
            try:
                self._engine = self._load_engine()
            except ModuleNotFoundError:
                if engine == "gigatoken":
                    raise

    @property
    def engine(self) -> str:
        return "python" if self._engine is None else "gigatoken"

    def encode(self, text: str) -> list[int]:
        tokens, _ = self.encode_documents([text.encode()])
        return tokens.tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        tokens, lengths = self.encode_documents([text.encode() for text in texts])
        ends = lengths.cumsum()
        return [tokens[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)]

    def encode_documents(
        self, texts: Sequence[bytes], *, append_eod: bool = False
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        if append_eod:
            self.special_id("eod")
        full = [text for text in texts if text]
        tokens, ends = self._encode_terminated(full)
        lengths = np.diff(ends, prepend=-1)
        if append_eod:
            tokens[ends] = self.eod
        else:
            keep = np.ones(len(tokens), dtype=bool)
            keep[ends] = False
            tokens, lengths = tokens[keep], lengths - 1
        if len(full) < len(texts):
            some = lengths
            lengths = np.zeros(len(texts), dtype=np.int64)
            lengths[[i for i, text in enumerate(texts) if text]] = some
        return tokens, lengths

    def _encode_terminated(
        self, texts: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of all texts, each followed by the separator's, and the positions of those.

        One call of the engine on the joined texts is the fastest form it has, and what
        ``append_eod`` wants on disk.
        """
        if self._engine is not None:
            tokens = self._engine.encode(SEPARATOR.encode().join([*texts, b""]))
            ends = np.flatnonzero(tokens == self._separator)
            if len(ends) == len(texts):  # or a text contains the separator
                return tokens, ends
        rows = [self.readable.encode(text.decode()) for text in texts]
        flat = [token for row in rows for token in (*row, self._separator)]
        lengths = np.fromiter((len(row) + 1 for row in rows), dtype=np.int64, count=len(rows))
        return np.array(flat, dtype=np.uint32), lengths.cumsum() - 1

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        return None if self._engine is None else self.readable.encode_start(text, letters)

    def forget(self) -> None:
        # gigatoken keeps every distinct word for good: 10 bytes of memory for each byte of random
        # letters, and nothing but a new engine lets go of it.
        if self._engine is not None:
            self._engine = None
            self._engine = self._load_engine()

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        try:
            pieces = [self.byte_strings[int(i)] for i in ids]
        except KeyError as error:
            raise ValueError(
                f"{self.name}: token {error} is not in the vocabulary of {self.vocab_size}"
            ) from None
        return b"".join(pieces).decode(errors="replace")

    @cached_property
    def byte_strings(self) -> dict[int, bytes]:
        """What each id stands for, special tokens included."""
        byte_of = {ord(letter): chr(byte) for byte, letter in byte_to_letter().items()}
        strings = {i: text.encode() for i, text in self.special_text.items()}
        for entry, i in self.readable.ids.items():
            strings[i] = entry.translate(byte_of).encode("latin-1")
        return strings

    def _load_engine(self) -> BPETokenizer:
        from gigatoken.gigatoken_rs import load_hf_json

        pattern = self.readable.words.pattern
        words: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
        if pattern != GPT2_PATTERN:  # which is what ByteLevel does by itself
            split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
            stages = [split | {"invert": False}, words | {"use_regex": False}]
            words = {"type": "Sequence", "pretokenizers": stages}
        description = {
            "added_tokens": [{"id": self._separator, "content": SEPARATOR, "special": True}],
            "pre_tokenizer": words,
            "model": {
                "type": "BPE",
                "vocab": {**self.readable.ids, SEPARATOR: self._separator},
                "merges": list(self.readable.ranks),
                "ignore_merges": self.readable.ignore_merges,
            },
        }
        engine = load_hf_json(json.dumps(description, ensure_ascii=False))
        assert not hasattr(engine, "encode_no_normalize"), "SentencePiece, which was not asked for"
        return cast("BPETokenizer", engine)


@lru_cache(maxsize=1)
def byte_to_letter() -> dict[int, str]:
    """GPT-2's spelling of bytes in vocabulary files: printable ones as themselves, the others as
    letters from U+0100 on. In the order of the ids: a byte's position here is its id in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable}
    return letters | {b: chr(0x100 + i) for i, b in enumerate(others)}
