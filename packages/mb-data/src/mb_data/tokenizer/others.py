"""Tokenizers whose work another library does, and the one that does none.

They have no second implementation here, so preprocessing has nothing to compare them with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer


class HuggingFaceTokenizer(Tokenizer):
    """Any ``tokenizer.json``, through the tokenizers library.

    Neither special tokens in the text nor a template around it: ids of the text alone.

    Raises ModuleNotFoundError without the library, ValueError for a file it cannot read.
    """

    def __init__(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        fingerprint: str,
        special: Mapping[str, int],
        num_extra_ids: int = 0,
    ) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{name} needs the tokenizers library: pip install 'mb-data[tokenizers]'",
                name="tokenizers",
            ) from error
        try:
            self._engine = tokenizers.Tokenizer.from_file(fspath(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
        self._engine.encode_special_tokens = True  # that is: as text
        self._engine.no_truncation()
        self._engine.no_padding()
        self.name = name
        self.fingerprint = fingerprint
        self.special = dict(special)
        base = max(self._engine.get_vocab(with_added_tokens=True).values()) + 1
        self.extra_ids = tuple(range(base, base + num_extra_ids))
        self._added = {i: f"<extra_id_{n}>" for n, i in enumerate(self.extra_ids)}
        self.vocab_size = base + num_extra_ids

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            text.encode()  # half a surrogate pair is an error here too
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return _decode(ids, self, self._added, self._decode_run)

    def _decode_run(self, ids: list[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model`` file (Kudo and Richardson 2018, arXiv:1808.06226).

    Like Megatron, appends ``<CLS> <SEP> <EOD> <MASK>``, then ``<PAD> <BOS> <EOS>`` if the model
    has none of its own, then extra ids.

    Raises ModuleNotFoundError without the library, ValueError for a file it cannot read.
    """

    def __init__(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        fingerprint: str,
        num_extra_ids: int = 0,
    ) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{name} needs sentencepiece: pip install 'mb-data[sentencepiece]'",
                name="sentencepiece",
            ) from error
        self._engine: Any = SentencePieceProcessor()
        try:
            self._engine.Load(fspath(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path}: not a SentencePiece model: {error}") from error
        self.name = name
        self.fingerprint = fingerprint
        size = self._engine.GetPieceSize()
        pieces = {self._engine.IdToPiece(i): i for i in range(size)}
        self._added: dict[int, str] = {}
        self.special = {}
        for role in ("cls", "sep", "eod", "mask", "pad", "bos", "eos"):
            piece = f"<{role.upper()}>"
            if role in ("pad", "bos", "eos"):
                own = getattr(self._engine, f"{role}_id")()
                if own >= 0:
                    self.special[role] = own
                    continue
            self.special[role] = pieces.get(piece, size + len(self._added))
            if piece not in pieces:
                self._added[self.special[role]] = piece
        extra: list[int] = []
        for i in range(num_extra_ids):
            piece = f"<extra_id_{i}>"
            extra.append(pieces.get(piece, size + len(self._added)))
            if piece not in pieces:
                self._added[extra[-1]] = piece
        self.extra_ids = tuple(extra)
        self.vocab_size = size + len(self._added)

    def encode(self, text: str) -> list[int]:
        return self._engine.EncodeAsIds(text.encode())

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return _decode(ids, self, self._added, self._engine.DecodeIds)


class NullTokenizer(Tokenizer):
    """Text that is token ids already, separated by white space; ``eod`` is one more id.

    Raises ValueError for a size below 1, and in ``encode`` for what is no id.
    """

    def __init__(self, name: str, size: int) -> None:
        if size < 1:
            raise ValueError(f"{name}: the vocabulary must have at least one id, got {size}")
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
        return " ".join(map(str, _checked(ids, self)))


def _decode(
    ids: Sequence[int] | npt.NDArray[np.integer],
    tokenizer: Tokenizer,
    added: Mapping[int, str],
    decode: Callable[[list[int]], str],
) -> str:
    """Decode runs of a library's own ids with it, those added to them by their names."""
    parts: list[str] = []
    for is_added, group in itertools.groupby(_checked(ids, tokenizer), key=added.__contains__):
        run = list(group)
        parts.append("".join(added[i] for i in run) if is_added else decode(run))
    return "".join(parts)


def _checked(ids: Sequence[int] | npt.NDArray[np.integer], tokenizer: Tokenizer) -> list[int]:
    """Plain integers, all of the vocabulary."""
    numbers = [int(i) for i in ids]
    for i in numbers:
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(
                f"{tokenizer.name}: token {i} is not in 0 to {tokenizer.vocab_size - 1}"
            )
    return numbers
