"""Tokenizers by name and by file.

| given                                   | tokenizer                                         |
|-----------------------------------------|---------------------------------------------------|
| ``gpt2``, ``bert-base-uncased``         | inside this package                               |
| ``bert-base-uncased:8192``              | its first 8,192 pieces, the most frequent         |
| ``null:1000``                           | the text is ids already, 0 to 999                 |
| ``….json`` with a "model" inside        | ``tokenizer.json``                                |
| ``vocab.json`` or ``merges.txt``        | the two together, from one directory              |
| two paths with ``:`` between            | such a pair under other names                     |
| ``tekken.json``, ``o200k_base.tiktoken``| ranks of byte strings                             |
| ``….model`` of lines of base64          | the same: Llama 3 and 4                           |
| ``….model``, ``….model.v3``             | SentencePiece                                     |
| any other ``….txt``                     | WordPiece vocabulary                              |
| a directory                             | the first of these that is in it                  |
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import os
import re
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from mb_data.tokenizer.base import MOST_IDS, Tokenizer, check_engine
from mb_data.tokenizer.bpe_files import (
    from_merges,
    from_tokenizer_json,
    from_vocab_and_merges,
    said_beside,
)
from mb_data.tokenizer.libraries import SentencePieceTokenizer
from mb_data.tokenizer.null import NullTokenizer
from mb_data.tokenizer.rank_files import from_tekken, from_tiktoken
from mb_data.tokenizer.wordpiece import WordPiece

BERT = "bert-base-uncased"
# The pieces that a word of English letters and digits falls into at worst are among them.
LEAST_PIECES = 4352
NAMES = ("gpt2", BERT, f"{BERT}:<size>", "null:<size>")
RANKS = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")  # the first line of such a file
IN_DIRECTORY = (
    "tokenizer.json",
    "vocab.json",
    "tekken.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "vocab.txt",
)


def load_tokenizer(
    name: str | os.PathLike[str],
    *,
    engine: str = "auto",
    num_extra_ids: int = 0,
    lower_case: bool = True,
    add_roles: bool = False,
    eod_token: str | None = None,
) -> Tokenizer:
    """The tokenizer of a name or file; see the table above.

    Args:
        engine: "auto" for the fastest that is installed; "python" for the readable twin, which
            byte-level BPE and WordPiece have; or the library's name.
        num_extra_ids: append ``<extra_id_0>``, …: T5's sentinels, Megatron's --vocab-extra-ids. 0
            takes those that the file has, or the tokenizer_config.json beside a SentencePiece model
            of T5's, whose first comes last.
        lower_case: whether a WordPiece vocabulary from a file is uncased.
        add_roles: append to a SentencePiece model what T5 and BERT need, see
            ``SentencePieceTokenizer``.
        eod_token: the special token that ends documents, if it is not the file's own choice.

    Raises:
        ValueError: an unknown name, a file that is no vocabulary, or neither a name nor a file; or
            not `lower_case` for what is no cased WordPiece vocabulary.
        ModuleNotFoundError: a library that the file needs is not installed.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise ValueError(
            f"expected a tokenizer's name, file or folder, got {type(name).__name__}; give one of "
            "transformers as the folder that its save_pretrained wrote"
        )
    name = os.fspath(name)
    if not 0 <= num_extra_ids < MOST_IDS:
        raise ValueError(
            f"the number of extra ids must be from 0 to {MOST_IDS - 1:,}, got {num_extra_ids}"
        )
    shared: dict[str, Any] = {"engine": engine, "num_extra_ids": num_extra_ids}
    of_files = {"lower_case": lower_case, "add_roles": add_roles}
    tokenizer = _named(name, **shared) or _from_file(name, _find(name), **shared, **of_files)
    cased = isinstance(tokenizer, WordPiece) and not tokenizer.readable.lower_case
    if not lower_case and not cased:
        raise ValueError(
            f"tokenizer {name}: expected the vocab.txt of a cased WordPiece with --cased "
            "(lower_case=False); any other says itself what becomes of capitals, so leave that out"
        )
    if eod_token is not None:
        eod = tokenizer.token_id(eod_token)
        if eod is None:
            raise ValueError(f"tokenizer {name} has no token {eod_token!r} to end documents with")
        tokenizer.special["eod"] = eod
    tokenizer.rebuild = partial(load_tokenizer, name, **shared, **of_files, eod_token=eod_token)
    return tokenizer


def _named(name: str, **options: Any) -> Tokenizer | None:
    """The tokenizer that comes with this package under a name; None if there is none."""
    if name == "gpt2":
        return from_merges(name, _embedded("gpt2_merges.txt.gz"), fingerprint=name, **options)
    if name == BERT or name.startswith(f"{BERT}:"):
        lines = _embedded("bert_base_uncased_vocab.txt.gz").splitlines()
        pieces = lines[: _first_pieces(name, len(lines))]
        return WordPiece(name, pieces, fingerprint=name, lower_case=True, **options)
    if name.startswith("null:"):
        size = name.removeprefix("null:")
        if not size.isdecimal():
            raise ValueError(f"tokenizer {name!r}: expected a size, as in null:1000")
        if options["num_extra_ids"]:
            raise ValueError("the null tokenizer has no extra ids")
        return NullTokenizer(name, int(size))
    return None


def _first_pieces(name: str, pieces: int) -> int:
    """How many pieces of BERT's vocabulary a name asks for."""
    if name == BERT:
        return pieces
    size = name.removeprefix(f"{BERT}:")
    if not size.isdecimal() or not LEAST_PIECES <= int(size) <= pieces:
        raise ValueError(
            f"tokenizer {name!r}: expected a size from {LEAST_PIECES} to {pieces}, as in "
            f"{BERT}:8192"
        )
    return int(size)


def _find(name: str) -> list[Path]:
    """The vocabulary's file or files."""
    paths = _pair(name)
    if name and len(paths) == 1 and paths[0].is_dir():  # "" is no name, Path("") this folder
        found = [paths[0] / file for file in IN_DIRECTORY if (paths[0] / file).is_file()]
        if not found:
            raise ValueError(f"tokenizer {name}: none of {', '.join(IN_DIRECTORY)} in there")
        paths = found[:1]
    if len(paths) == 1 and paths[0].name in ("vocab.json", "merges.txt"):
        paths = [paths[0].with_name("vocab.json"), paths[0].with_name("merges.txt")]
    for path in paths:
        if not path.is_file():
            if path.parent != Path() or path.suffix or len(paths) > 1:
                existing(path)
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(
                f"unknown tokenizer {name!r}{hint} Known names: {', '.join(NAMES)}; or give a file"
            )
    return paths


def _pair(name: str) -> list[Path]:
    """The one path that a name is, or the two with ``:`` between them: folders may have ``:`` in
    their names, so what is there decides."""
    pairs = [
        [Path(name[: sign.start()]), Path(name[sign.end() :])]
        for sign in re.finditer(re.escape(os.pathsep), name)
    ]
    there = [sum(path.is_file() for path in pair) for pair in pairs]
    if not any(there) or os.path.exists(name):
        return [Path(name)]
    return pairs[there.index(max(there))]


def _from_file(
    name: str,
    paths: list[Path],
    *,
    engine: str,
    num_extra_ids: int,
    lower_case: bool,
    add_roles: bool,
) -> Tokenizer:
    contents = [_read(path) for path in paths]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    path = paths[0]
    options: dict[str, Any] = {"fingerprint": digest, "num_extra_ids": num_extra_ids}
    if len(paths) == 2:
        return from_vocab_and_merges(name, *contents, engine=engine, **options)
    if path.name.startswith("tekken") and path.suffix == ".json":
        return from_tekken(name, path, contents[0], engine=engine, **options)
    if path.suffix == ".tiktoken" or RANKS.match(contents[0]):
        return from_tiktoken(name, path, contents[0], engine=engine, **options)
    if path.suffix == ".json":
        return from_tokenizer_json(name, path, contents[0], engine=engine, **options)
    if ".model" in path.suffixes:
        check_engine(engine, str(path), "sentencepiece")
        theirs = 0 if add_roles or num_extra_ids else _sentinels_of_t5(path)
        if theirs:
            options |= {"num_extra_ids": theirs, "first_extra_id_last": True}
        return SentencePieceTokenizer(
            name, path, add_roles=add_roles, fast=engine == "auto", **options
        )
    if path.suffix == ".txt":
        try:
            # The line ends that files have, not U+2028 and the like: as Megatron reads them.
            lines = io.StringIO(contents[0].decode(), newline=None)
            pieces = [line.strip() for line in lines]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not a vocabulary: {error}") from error
        return WordPiece(name, pieces, lower_case=lower_case, engine=engine, **options)
    raise ValueError(f"tokenizer {path}: expected a .json, .model, .tiktoken or .txt file")


def _sentinels_of_t5(model: Path) -> int:
    """How many a T5 of Hugging Face's has behind its SentencePiece model, which knows of none."""
    config = model.with_name("tokenizer_config.json")
    about = said_beside(config)
    default = 100 if str(about.get("tokenizer_class", "")).startswith("T5Tokenizer") else 0
    found = about.get("extra_ids", default)
    if type(found) is not int or not 0 <= found < MOST_IDS:
        raise ValueError(f"{config}: expected extra_ids from 0 to {MOST_IDS - 1:,}, got {found!r}")
    return found


def existing(path: str | os.PathLike[str]) -> Path:
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"tokenizer {os.fspath(path)}: no such file; nothing is downloaded, so give a file or "
            "a folder that is here. GPT-2's and BERT's vocabularies are inside the package: gpt2 "
            "and bert-base-uncased need no files"
        )
    return Path(path)


def _read(path: Path) -> bytes:
    return existing(path).read_bytes()


def _embedded(file: str) -> str:
    data = resources.files("mb_data").joinpath("vocabularies", file).read_bytes()
    return gzip.decompress(data).decode()
