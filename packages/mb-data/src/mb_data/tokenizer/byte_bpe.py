"""Byte-level BPE as a tokenizer: GPT-2, Llama 3, Qwen, DeepSeek, gpt-oss, Mistral's tekken.

The tokens are those of ``ReadableBPE``. gigatoken makes them many times faster. Where it may
differ, around letters that are newer than some library's Unicode tables, the readable twin encodes
the text, and such documents are counted.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer, check_engine, check_vocabulary, checked_ids
from mb_data.tokenizer.disputed import disputed_letters
from mb_data.tokenizer.fast_bpe import SEPARATOR, FastBPE, letters_to_bytes
from mb_data.tokenizer.readable_bpe import GPT2_PATTERN, Form, ReadableBPE

# Bytes that UTF-8 does not use: DeepSeek's first vocabularies, made from texts alone, lack them.
NO_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


class ByteLevelBPE(Tokenizer):
    """Byte-level BPE on gigatoken; on ``ReadableBPE`` where gigatoken cannot be imported.

    Args:
        name: for messages.
        ids: id of every entry, see ``ReadableBPE``; all single bytes of UTF-8 must be there.
        merges: lines ``Ġ t``, in the order they were learnt; None: by the ids.
        fingerprint: of the vocabulary's files.
        special: ids of special tokens by role.
        special_text: text of special tokens by id, for ``decode``.
        num_extra_ids: how many ``<extra_id_i>`` to append.
        patterns, ignore_merges, form: see ``ReadableBPE``.
        scheme, ranks: see ``FastBPE``.
        engine: "gigatoken", "python", or "auto" for the first that works.

    Raises:
        ValueError: a byte is missing from the vocabulary, a merge makes an unknown entry, or an id
            is out of all proportion.
        ModuleNotFoundError: ``engine="gigatoken"`` and it is not installed.
        RuntimeError: gigatoken is installed but does not know the patterns.
    """

    def __init__(
        self,
        name: str,
        ids: Mapping[str, int] | Mapping[bytes, int],
        merges: Sequence[str] | None,
        *,
        fingerprint: str,
        special: Mapping[str, int],
        special_text: Mapping[int, str],
        num_extra_ids: int = 0,
        patterns: Sequence[str] = (GPT2_PATTERN,),
        ignore_merges: bool = False,
        form: Form | None = None,
        scheme: str | None = None,
        ranks: bytes | None = None,
        engine: str = "auto",
    ) -> None:
        check_engine(engine, name, "gigatoken", "python")
        check_vocabulary(name, [*ids.values(), *special_text])
        self.name = name
        self.fingerprint = fingerprint
        self.special = dict(special)
        self.readable = ReadableBPE(
            ids, merges, patterns, ignore_merges=ignore_merges or merges is None, form=form
        )
        _check(name, self.readable)
        size = max([*ids.values(), *special_text]) + 1
        self.vocab_size = size + num_extra_ids
        self.extra_ids = tuple(range(size, self.vocab_size))
        extra = {i: f"<extra_id_{n}>" for n, i in enumerate(self.extra_ids)}
        self.special_text = {**special_text, **extra}
        eod = self.special.get("eod")
        # The end of document itself, unless it is an ordinary entry too: that saves a pass. With
        # ranks the separator must be larger than all of them.
        taken = merges is None or eod not in self.special_text or eod in ids.values()
        self._separator: int = self.vocab_size if taken or eod is None else eod
        self._fast: FastBPE | None = None
        if engine != "python":
            try:
                self._fast = FastBPE(self.readable, self._separator, scheme=scheme, ranks=ranks)
            except ModuleNotFoundError:
                if engine == "gigatoken":
                    raise

    @property
    def engine(self) -> str:
        return "python" if self._fast is None else "gigatoken"

    def prepare(self) -> None:
        if self._fast is None or self._fast.loaded:
            return
        with self._fast.loading():
            # Meanwhile load what the cross-check and the search for letters need.
            _ = self.readable.expressions
            disputed_letters()
        try:
            _ = self._fast.engine
        except RuntimeError as error:
            warnings.warn(
                f"{self.name}: gigatoken cannot read this vocabulary ({error}); the readable "
                "implementation takes its place, at a MB of text a second",
                RuntimeWarning,
                stacklevel=2,
            )
            self._fast = None

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
            if self._separator != self.eod:
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
        self, texts: list[bytes]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of all texts, each followed by the separator's, and the positions of those."""
        self.prepare()
        if self._fast is None:
            return self._read(texts)
        if self.readable.form:
            texts = [_normalize(text, self.readable.form) for text in texts]
        careful = set(disputed_letters().find(texts))
        if not careful:
            found = self._fast.encode(texts)
            if found is not None:
                return found
        careful.update(i for i, text in enumerate(texts) if SEPARATOR.encode() in text)
        assert careful, "the engine found an end of document that no text has"
        self.careful_documents += len(careful)
        return self._encode_carefully(texts, careful)

    def _encode_carefully(
        self, texts: list[bytes], careful: set[int]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The same, where some texts need care. Only the surroundings of such places are encoded by
        the readable twin: it takes a second for a megabyte, and a long text may have one place."""
        parts = [self.readable.pieces(t) if i in careful else [t] for i, t in enumerate(texts)]
        pieces = [piece for part in parts for piece in part]
        slow = np.array([SEPARATOR.encode() in piece for piece in pieces])
        slow[disputed_letters().find(pieces)] = True
        tokens, ends = _interleave(
            slow,
            self._encode_terminated([p for p, read in zip(pieces, slow, strict=True) if not read]),
            self._read([p for p, read in zip(pieces, slow, strict=True) if read]),
        )
        inner = np.ones(len(pieces), dtype=bool)
        inner[np.cumsum([len(part) for part in parts]) - 1] = False
        ends_of_texts = ends[~inner] - np.cumsum(inner)[~inner]
        return np.delete(tokens, ends[inner]), ends_of_texts

    def _read(self, texts: Sequence[bytes]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        rows = [self.readable.encode(text.decode()) for text in texts]
        flat = [token for row in rows for token in (*row, self._separator)]
        lengths = np.fromiter((len(row) + 1 for row in rows), dtype=np.int64, count=len(rows))
        return np.array(flat, dtype=np.uint32), lengths.cumsum() - 1

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        return None if self._fast is None else self.readable.encode_start(text, letters)

    def forget(self) -> None:
        if self._fast is not None:
            self._fast.forget()

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        # A model has rows for the gaps of a vocabulary too, and may write such an id.
        pieces = [self.byte_strings.get(i, b"") for i in checked_ids(ids, self)]
        return b"".join(pieces).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        return next((i for i, special in self.special_text.items() if special == text), None)

    @cached_property
    def byte_strings(self) -> dict[int, bytes]:
        """What each id stands for, special tokens included."""
        strings = {i: text.encode() for i, text in self.special_text.items()}
        for entry, i in self.readable.ids.items():
            strings[i] = letters_to_bytes(entry) if self.readable.spelt else entry
        return strings


def _check(name: str, vocabulary: ReadableBPE) -> None:
    ids, letters = vocabulary.ids, vocabulary.letters
    if vocabulary.spelt:
        unknown = set("".join(ids)).difference(letters.values())
        if unknown:
            entry = next(entry for entry in ids if not unknown.isdisjoint(entry))
            raise ValueError(f"{name}: a letter of entry {entry!r} stands for no byte")
    missing = [byte for byte in letters if letters[byte] not in ids and byte not in NO_UTF8]
    if missing:
        raise ValueError(f"{name}: byte {missing[0]:#04x} is not in the vocabulary")
    for merge in vocabulary.merges or ():
        if merge.replace(" ", "") not in ids:
            raise ValueError(f"{name}: merge {merge!r} makes no entry of the vocabulary")
    words = set(" ".join(vocabulary.merges or ()).split(" ")) - ids.keys()
    for merge in vocabulary.merges or () if words else ():
        if word := next(filter(words.__contains__, merge.split(" ")), None):
            raise ValueError(
                f"{name}: merge {merge!r} is of {word!r}, which is neither a byte nor made by a "
                "merge: not byte-level BPE; take the model's tokenizer.json"
            )


def _normalize(text: bytes, form: Form) -> bytes:
    if text.isascii():
        return text
    letters = text.decode()
    return (
        text
        if unicodedata.is_normalized(form, letters)
        else unicodedata.normalize(form, letters).encode()
    )


def _interleave(
    second: npt.NDArray[np.bool_],
    *parts: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Terminated texts in their order: those where ``second`` is True from the second part."""
    lengths = np.empty(len(second), dtype=np.int64)
    for chosen, (_, ends) in zip((~second, second), parts, strict=True):
        lengths[chosen] = np.diff(ends, prepend=-1)
    tokens = np.empty(int(lengths.sum()), dtype=np.uint32)
    of_second = np.repeat(second, lengths)
    for chosen, (values, _) in zip((~of_second, of_second), parts, strict=True):
        tokens[chosen] = values
    return tokens, lengths.cumsum() - 1
