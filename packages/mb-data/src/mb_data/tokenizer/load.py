"""Tokenizers by name or file."""

from __future__ import annotations

import gzip
import os
from importlib import resources

from mb_data.tokenizer.base import Tokenizer
from mb_data.tokenizer.byte_bpe import ByteLevelBPE, byte_to_letter

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name: str | os.PathLike[str], *, engine: str = "auto") -> Tokenizer:
    """The tokenizer of that name: ``gpt2``.

    Raises ValueError for a name that is not known.
    """
    name = os.fspath(name)
    if name == "gpt2":
        return gpt2(engine=engine)
    raise ValueError(f"unknown tokenizer {name!r}; known: gpt2")


def gpt2(*, engine: str = "auto") -> ByteLevelBPE:
    """GPT-2's tokenizer from the merges inside this package: 50,257 entries."""
    letters = byte_to_letter()
    byte_of = {letter: bytes([b]) for b, letter in letters.items()}
    merges = []
    for line in _embedded("gpt2_merges.txt.gz").splitlines()[1:]:
        left, right = line.split(" ")
        merges.append((b"".join(byte_of[c] for c in left), b"".join(byte_of[c] for c in right)))
    ids = {bytes([b]): i for i, b in enumerate(letters)}
    ids |= {left + right: 256 + rank for rank, (left, right) in enumerate(merges)}
    eod = len(ids)
    return ByteLevelBPE(
        "gpt2", ids, merges, special={"eod": eod}, special_text={eod: END_OF_TEXT}, engine=engine
    )


def _embedded(file: str) -> str:
    data = resources.files("mb_data").joinpath("vocabularies", file).read_bytes()
    return gzip.decompress(data).decode()
