"""gigatoken, the engine behind byte-level BPE: many documents in one call."""

from __future__ import annotations

import binascii
import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, ReadableBPE, byte_to_letter

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer

# Ends a document on its way through the engine, which then needs one call for many documents. No
# end of it is a start of it, so a document's last letters and the separator never make another
# one; a document that contains all of it is left to the caller.
SEPARATOR = "\x00<mb-data: end of document>"

# The engine's names of patterns, for vocabularies that come without merges.
SCHEMES = {
    GPT2_PATTERN: "gpt2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "olmo3",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s+": "gpt4",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "o200k",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "nemotron",
}


class FastBPE:
    """The tokens of a ``ReadableBPE``, from gigatoken.

    Args:
        readable: vocabulary, merges and patterns. Normalization is the caller's.
        separator: the id that ends each text's tokens; of no entry of the vocabulary.
        by_rank: let the engine merge by ids instead of by the list of merges: it loads in half the
            time. The same for vocabularies whose ids are in the order of their merges, as tiktoken
            takes GPT-2's; `separator` must be the next id.

    The engine is made at the first text, 0.3 s for GPT-2's vocabulary, but for patterns of which
    only itself can say whether it knows them: who wants sizes and ids does not wait for it.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
        RuntimeError: the engine does not know these patterns.
    """

    def __init__(self, readable: ReadableBPE, separator: int, *, by_rank: bool = False) -> None:
        self.readable = readable
        self._by_rank = by_rank or readable.merges is None
        self.separator = separator
        # Ranks are 0, 1, ... to the engine, whatever the first id is.
        self._first_id = min(readable.ids.values()) if self._by_rank else 0
        self._engine: BPETokenizer | None = None
        importlib.import_module("gigatoken.gigatoken_rs")
        if self._by_rank:
            self._scheme()
        elif readable.patterns != (GPT2_PATTERN,):
            self._engine = self._load()

    def encode(
        self, texts: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]] | None:
        """Tokens of all texts, each followed by ``separator``, and the positions of those.

        None if a text contains ``SEPARATOR``. One call on the joined texts is the engine's fastest
        form, and the tokens are what ``append_eod`` wants on disk.
        """
        if self._engine is None:
            self._engine = self._load()
        tokens = self._engine.encode(SEPARATOR.encode().join([*texts, b""]))
        if self._first_id:
            tokens = tokens + np.uint32(self._first_id)
        ends = np.flatnonzero(tokens == self.separator)
        return (tokens, ends) if len(ends) == len(texts) else None

    def forget(self) -> None:
        """Drop the words it has seen, which only a new engine does: it keeps every distinct one,
        10 bytes of memory for each byte of random letters."""
        self._engine = None

    def _scheme(self) -> str:
        """The engine's name of the patterns, for ids that are ranks."""
        ids = self.readable.ids.values()
        dense = len(set(ids)) == len(ids) == max(ids) + 1 - self._first_id
        scheme = SCHEMES.get("|".join(self.readable.patterns))
        if scheme is None or not dense:
            raise RuntimeError(f"no engine for the patterns {list(self.readable.patterns)}")
        return scheme

    def _load(self) -> BPETokenizer:
        from gigatoken.gigatoken_rs import BPETokenizer, load_hf_json

        readable = self.readable
        if self._by_rank:
            entries = sorted(readable.ids, key=readable.ids.__getitem__)
            special = {SEPARATOR: self.separator - self._first_id}
            with tempfile.TemporaryDirectory() as directory:
                path = os.path.join(directory, "ranks")
                with open(path, "wb") as file:
                    for rank, entry in enumerate(entries):
                        word = binascii.b2a_base64(letters_to_bytes(entry), newline=False)
                        file.write(b"%s %d\n" % (word, rank))
                return BPETokenizer.from_tiktoken(path, self._scheme(), special)
        words: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
        if readable.patterns != (GPT2_PATTERN,):  # which is what ByteLevel does by itself
            split = {"type": "Split", "behavior": "Isolated", "invert": False}
            stages = [split | {"pattern": {"Regex": pattern}} for pattern in readable.patterns]
            words = {"type": "Sequence", "pretokenizers": [*stages, words | {"use_regex": False}]}
        description = {
            "added_tokens": [{"id": self.separator, "content": SEPARATOR, "special": True}],
            "pre_tokenizer": words,
            "model": {
                "type": "BPE",
                "vocab": {**readable.ids, SEPARATOR: self.separator},
                "merges": list(readable.merges or ()),
                "ignore_merges": readable.ignore_merges,
            },
        }
        engine = load_hf_json(json.dumps(description, ensure_ascii=False))
        assert not hasattr(engine, "encode_no_normalize"), "SentencePiece, which was not asked for"
        return cast("BPETokenizer", engine)


def letters_to_bytes(entry: str) -> bytes:
    """The bytes that an entry of the vocabulary spells."""
    return entry.translate(_BYTE_OF).encode("latin-1")


_BYTE_OF = {ord(letter): chr(byte) for byte, letter in byte_to_letter().items()}
