"""Tokenizers of two libraries: tokenizers, for any ``tokenizer.json``, and sentencepiece.

Where gigatoken gives the same tokens it is used, many times faster, and checked against the
library. Elsewhere there is no second implementation, and preprocessing cannot check the tokens.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.tokenizer.base import Tokenizer, check_vocabulary, checked_ids
from mb_data.tokenizer.fast_sentencepiece import FastSentencePiece, model_description
from mb_data.words import missing_package


class LibraryTokenizer(Tokenizer):
    """What the tokenizers of both libraries share."""

    library: str
    fast: bool  # whether to use gigatoken where it can
    _added: dict[int, str]  # tokens that the library does not know, by id
    # Ids of the 256 bytes, by which letters are spelt that are no entries; none if they are not.
    _spelt: Sequence[int] = ()
    _bytes: Mapping[int, int] = {}

    @property
    def engine(self) -> str:
        return "gigatoken" if self._fast else self.library

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_documents(
        self, texts: Sequence[bytes], *, append_eod: bool = False
    ) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        if self._fast is None:
            return super().encode_documents(texts, append_eod=append_eod)
        tokens, lengths = self._fast.encode_documents(texts)
        if append_eod:
            ends = lengths.cumsum()[lengths > 0]
            tokens = np.insert(tokens, ends, self.eod)
            lengths = lengths + (lengths > 0)
        return tokens, lengths

    def reference_start(self, text: str, letters: int) -> list[int] | None:
        return None if self._fast is None else self._fast.reference_start(text, letters)

    def forget(self) -> None:
        if self._fast is not None:
            self._fast.forget()

    def prepare(self) -> None:
        _ = self._fast

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        parts: list[str] = []
        for is_added, group in itertools.groupby(checked_ids(ids, self), self._added.__contains__):
            run = list(group)
            if is_added:
                parts += [self._added[i] for i in run]
            else:
                parts.append(self._decode_run(self._of_whole_letters(run)))
        return "".join(parts)

    def _spell(self, ids: Mapping[str, int]) -> None:
        """Note which tokens are bytes, if the vocabulary has all."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        if all(name in ids for name in names):
            self._spelt = [ids[name] for name in names]
            self._bytes = {i: byte for byte, i in enumerate(self._spelt)}

    def _of_whole_letters(self, ids: list[int]) -> list[int]:
        """The ids with U+FFFD in place of bytes that are not UTF-8, as where a text is cut.

        For one of those tokenizers would show none of the letters that are spelt next to it, and
        sentencepiece one for each byte of a letter.
        """
        found: list[int] = []
        for are_bytes, group in itertools.groupby(ids, self._bytes.__contains__):
            run = list(group)
            if are_bytes:
                text = bytes(self._bytes[i] for i in run).decode(errors="replace")
                run = [self._spelt[byte] for byte in text.encode()]
            found += run
        return found

    @abstractmethod
    def _decode_run(self, ids: list[int]) -> str:
        """The text of some of the library's own ids."""

    @abstractmethod
    def description(self) -> tuple[dict[str, Any], str | None]:
        """A tokenizer.json's content, and a pattern of texts on which that would differ.

        Raises RuntimeError for what ``FastSentencePiece`` cannot do.
        """

    @cached_property
    def _fast(self) -> FastSentencePiece | None:
        """gigatoken, where it gives the library's tokens: found out when a text is encoded."""
        if not self.fast:
            return None
        try:
            return FastSentencePiece(*self.description(), library=self.encode)
        except (ModuleNotFoundError, RuntimeError, ValueError):
            return None


class HuggingFaceTokenizer(LibraryTokenizer):
    """Any ``tokenizer.json``, through the tokenizers library.

    Neither special tokens in the text nor a template around it: ids of the text alone.

    Args:
        description: the file's content, with only those added tokens that are text.
        added: ids of all added tokens.
        fast: whether to use gigatoken where it can.

    Raises ModuleNotFoundError without the library, ValueError for a file it cannot read.
    """

    library = "tokenizers"

    def __init__(
        self,
        name: str,
        description: dict[str, Any],
        *,
        fingerprint: str,
        special: Mapping[str, int],
        added: Mapping[str, int],
        num_extra_ids: int = 0,
        fast: bool = True,
    ) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            wanted = f"{name} needs the tokenizers library"
            raise missing_package("tokenizers", wanted, "tokenizers") from error

        # Of a list of pieces, as Unigram has, the places are the ids.
        vocabulary = description["model"].get("vocab")
        ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
        check_vocabulary(name, [*ids, *added.values()])

        def load(description: dict[str, Any]) -> Any:
            return tokenizers.Tokenizer.from_str(json.dumps(description, ensure_ascii=False))

        try:
            engine = load(description)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{name}: not a tokenizer.json: {error}") from error
        # An added token that is normalized to nothing is in no text, but the library looks for it
        # between the bytes of letters, and panics.
        tokens = description.get("added_tokens", [])
        found = [token for token in tokens if not _vanishes(token, engine.normalizer)]
        if len(found) < len(tokens):
            description = {**description, "added_tokens": found}
            engine = load(description)
        engine.no_truncation()
        engine.no_padding()
        self._library = engine
        self.name = name
        self.fingerprint = fingerprint
        self.special = dict(special)
        # The library numbers added tokens anew, one after the other from the vocabulary's end.
        known = engine.get_vocab(with_added_tokens=True)
        self._renumbered = {i: added[t] for t, i in known.items() if added.get(t, i) != i}
        self._numbers = {i: number for number, i in self._renumbered.items()}
        known = {text: self._renumbered.get(i, i) for text, i in known.items()}
        if not known:
            raise ValueError(f"{name}: expected a vocabulary, got one of no tokens")
        base = max([*known.values(), *added.values()]) + 1
        self.extra_ids = tuple(range(base, base + num_extra_ids))
        if not num_extra_ids:  # those that the file has, as T5's do, in whatever order
            names = (f"<extra_id_{n}>" for n in itertools.count())
            there = itertools.takewhile(added.__contains__, names)
            self.extra_ids = tuple(added[name] for name in there)
        self._ids = {**known, **added}
        # Tokens that are text, as runs of spaces, are spelt by its decoder.
        texts = {token["content"] for token in description.get("added_tokens", [])}
        self._added = {i: text for text, i in added.items() if text not in texts}
        self._added |= {i: f"<extra_id_{n}>" for n, i in enumerate(self.extra_ids)}
        self.vocab_size = base + num_extra_ids
        self.fast = fast
        self._read_from = description
        if "ByteFallback" in json.dumps(description.get("decoder")):
            self._spell(known)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            text.encode()  # half a surrogate pair is an error here too
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        if not self._renumbered:
            return [encoding.ids for encoding in encodings]
        return [[self._renumbered.get(i, i) for i in encoding.ids] for encoding in encodings]

    def description(self) -> tuple[dict[str, Any], str | None]:
        return self._read_from, None

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def word_starts(self) -> npt.NDArray[np.bool_]:
        found = super().word_starts()
        model = self._read_from["model"]
        if model.get("type") == "WordPiece":
            prefix = model.get("continuing_subword_prefix", "##")
            found[[i for text, i in self._ids.items() if text.startswith(prefix)]] = False
        return found

    def _decode_run(self, ids: list[int]) -> str:
        known = [self._numbers.get(i, i) for i in ids]
        return self._library.decode(known, skip_special_tokens=False)


class SentencePieceTokenizer(LibraryTokenizer):
    """A SentencePiece ``.model`` file (Kudo and Richardson 2018, arXiv:1808.06226).

    Documents end with the model's own ``</s>``, and nothing is appended but extra ids: Megatron's
    GPTSentencePieceTokenizer. With ``add_roles`` it is the old SentencePieceTokenizer, for T5 and
    BERT, which appends ``<CLS> <SEP> <EOD> <MASK>``, then ``<PAD> <BOS> <EOS>`` if the model has
    none of its own. With ``first_extra_id_last`` extra ids are in T5's own order, backwards.

    Raises ModuleNotFoundError without the library, ValueError for a file it cannot read.
    """

    library = "sentencepiece"

    def __init__(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        fingerprint: str,
        num_extra_ids: int = 0,
        first_extra_id_last: bool = False,
        add_roles: bool = False,
        fast: bool = True,
    ) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError as error:
            wanted = f"{name} needs sentencepiece"
            raise missing_package("sentencepiece", wanted, "sentencepiece") from error
        self._library: Any = SentencePieceProcessor()
        try:
            self._library.Load(fspath(path))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path}: not a SentencePiece model: {error}") from error
        self.name = name
        self.fingerprint = f"{fingerprint}, roles added" if add_roles else fingerprint
        self._size = size = self._library.GetPieceSize()
        self._pieces = {self._library.IdToPiece(i): i for i in range(size)}
        self._spell({piece: i for piece, i in self._pieces.items() if self._library.IsByte(i)})
        self._added = {}
        self.special = {}
        for role in ("cls", "sep", "eod", "mask", "pad", "bos", "eos"):
            own = -1
            if role in ("pad", "bos", "eos"):
                own = getattr(self._library, f"{role}_id")()
            if own >= 0:
                self.special[role] = own
            elif add_roles:
                self.special[role] = self._add(f"<{role.upper()}>")
        if not add_roles and "eos" in self.special:
            self.special["eod"] = self.special["eos"]
        step = -1 if first_extra_id_last else 1
        extra = [self._add(f"<extra_id_{i}>") for i in range(num_extra_ids)[::step]]
        self.extra_ids = tuple(extra[::step])
        self.vocab_size = size + len(self._added)
        self.fast = fast

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._library.EncodeAsIds(text.encode()) for text in texts]

    def description(self) -> tuple[dict[str, Any], str | None]:
        return model_description(self._library.serialized_model_proto())

    def token_id(self, text: str) -> int | None:
        return {**self._pieces, **{added: i for i, added in self._added.items()}}.get(text)

    def _decode_run(self, ids: list[int]) -> str:
        return self._library.DecodeIds(ids)

    def _add(self, piece: str) -> int:
        """The id of a piece that may have to be appended."""
        if piece in self._pieces:
            return self._pieces[piece]
        self._added[self._size + len(self._added)] = piece
        return self._size + len(self._added) - 1


def _vanishes(token: Mapping[str, Any], normalizer: Any) -> bool:
    """Whether an added token is looked for in normalized text, where nothing is left of it."""
    if normalizer is None or not token.get("normalized"):
        return False
    return not normalizer.normalize_str(token["content"])
