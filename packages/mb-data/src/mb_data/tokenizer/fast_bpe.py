"""gigatoken, the engine behind byte-level BPE: many documents in one call."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from binascii import b2a_base64
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from mb_data.system import naming
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, ReadableBPE, byte_to_letter

if TYPE_CHECKING:
    from gigatoken.gigatoken_rs import BPETokenizer

# Stands between documents, so that the engine needs one call for many of them. No end of it is also
# a start of it, so a document's last letters and the separator never make another one. A document
# that contains all of it is left to the caller.
SEPARATOR = "\x00<mb-data: end of document>"


class FastBPE:
    """The tokens of a ``ReadableBPE``, from gigatoken.

    Args:
        readable: vocabulary, merges and patterns. Normalization is the caller's.
        separator: the id that ends each text's tokens; of no entry of the vocabulary.
        scheme: the engine's name of the patterns, to let it merge by ids instead of by a list of
            merges: it loads in a fifth of the time. Ids must be in the order of the merges, without
            gaps, as tiktoken takes GPT-2's, and `separator` behind them all.
        ranks: the vocabulary as lines of base64 and rank from 0, if it came as such; for `scheme`.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
        RuntimeError: the engine does not know these patterns.
    """

    def __init__(
        self,
        readable: ReadableBPE,
        separator: int,
        *,
        scheme: str | None = None,
        ranks: bytes | None = None,
    ) -> None:
        self.readable = readable
        self.separator = separator
        self._scheme = scheme
        self._ranks = ranks
        # Ranks are 0, 1, ... to the engine, whatever the first id is.
        self._first_id = min(readable.ids.values()) if scheme else 0
        # An engine of single bytes knows the same patterns, and loads in a millisecond.
        _from_merges(ReadableBPE(SINGLE_BYTES, [], readable.patterns), len(SINGLE_BYTES))

    @cached_property
    def engine(self) -> BPETokenizer:
        """Loaded when the first text is encoded: a caller who only needs an id does not wait.

        Raises RuntimeError for a vocabulary that the engine refuses.
        """
        if self._scheme is not None:
            ranks = self._ranks or _lines(self.readable)
            try:
                return _from_ranks(ranks, self._scheme, self.separator - self._first_id)
            except BaseException as error:  # a panic of Rust's is no Exception
                if type(error).__name__ != "PanicException":
                    raise
                # Some entry is a word that no merges make. By merges it is found, whole.
                self._first_id = 0
        return _from_merges(self.readable, self.separator)

    @property
    def loaded(self) -> bool:
        return "engine" in vars(self)

    @contextlib.contextmanager
    def loading(self) -> Generator[None]:
        """Load the engine in a thread, which takes a quarter of a second without the interpreter's
        lock. If that fails, ``engine`` raises the error."""

        def load() -> None:
            with contextlib.suppress(Exception):
                _ = self.engine

        thread = threading.Thread(target=load)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def encode(
        self, texts: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]] | None:
        """Tokens of all texts, each followed by ``separator``, and the positions of those.

        None if a text contains ``SEPARATOR``. One call on the joined texts is the engine's fastest
        form, and the tokens are what ``append_eod`` wants on disk.
        """
        tokens = self.engine.encode(SEPARATOR.encode().join([*texts, b""]))
        if self._first_id:
            tokens = tokens + np.uint32(self._first_id)
        ends = np.flatnonzero(tokens == self.separator)
        return (tokens, ends) if len(ends) == len(texts) else None

    def forget(self) -> None:
        """Drop the words it has seen, which only a new engine does: it keeps every distinct one,
        10 bytes of memory for each byte of random letters."""
        self.__dict__.pop("engine", None)


def _from_merges(readable: ReadableBPE, separator: int) -> BPETokenizer:
    from gigatoken.gigatoken_rs import load_hf_json

    ids = readable.ids if readable.spelt else _spelt(readable.ids)
    words: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False}
    if readable.patterns != (GPT2_PATTERN,):  # which is what ByteLevel does by itself
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        stages = [split | {"pattern": {"Regex": pattern}} for pattern in readable.patterns]
        words = {"type": "Sequence", "pretokenizers": [*stages, words | {"use_regex": False}]}
    description = {
        "added_tokens": [{"id": separator, "content": SEPARATOR, "special": True}],
        "pre_tokenizer": words,
        "model": {
            "type": "BPE",
            "vocab": {**ids, SEPARATOR: separator},
            "merges": list(_merges_of_ranks(ids) if readable.merges is None else readable.merges),
            "ignore_merges": readable.ignore_merges,
        },
    }
    engine = load_hf_json(json.dumps(description, ensure_ascii=False))
    assert not hasattr(engine, "encode_no_normalize"), "SentencePiece, which was not asked for"
    return cast("BPETokenizer", engine)


def _merges_of_ranks(ids: Mapping[str, int]) -> Iterator[str]:
    """All pairs of entries that make a third, in the order of the ids of what they make."""
    for entry in sorted(ids, key=ids.__getitem__):
        pairs = [(entry[:i], entry[i:]) for i in range(1, len(entry))]
        known = [(ids[a], ids[b], f"{a} {b}") for a, b in pairs if a in ids and b in ids]
        yield from (merge for *_, merge in sorted(known))


def _from_ranks(lines: bytes, scheme: str, separator: int) -> BPETokenizer:
    from gigatoken.gigatoken_rs import BPETokenizer

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "ranks")
        with naming(path), open(path, "wb") as file:
            file.write(lines)
        return BPETokenizer.from_tiktoken(path, scheme, {SEPARATOR: separator})


def _lines(readable: ReadableBPE) -> bytes:
    """A vocabulary as lines of base64 and rank."""
    entries = sorted(readable.ids, key=readable.ids.__getitem__)
    if readable.spelt:
        entries = _slices(letters_to_bytes("".join(entries)), entries)
    coded = (b2a_base64(entry, newline=False) for entry in entries)
    return b"".join([b"%s %d\n" % line for line in zip(coded, range(len(entries)), strict=True)])


def _spelt(ids: Mapping[bytes, int]) -> dict[str, int]:
    """A vocabulary with its bytes written as letters."""
    letters = b"".join(ids).decode("latin-1").translate(byte_to_letter())
    return dict(zip(_slices(letters, ids), ids.values(), strict=True))


def _slices(whole: Any, like: Iterable[Any]) -> list[Any]:
    """A string cut into parts as long as those: to translate all at once is many times faster."""
    ends = list(accumulate(map(len, like), initial=0))
    return [whole[a:b] for a, b in pairwise(ends)]


def letters_to_bytes(entry: str) -> bytes:
    """The bytes that an entry of the vocabulary spells, or several of them."""
    return entry.translate(_BYTE_OF).encode("latin-1")


SINGLE_BYTES = {letter: i for i, letter in enumerate(byte_to_letter().values())}
_BYTE_OF = {ord(letter): chr(byte) for byte, letter in byte_to_letter().items()}
