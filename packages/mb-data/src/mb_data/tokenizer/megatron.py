"""Tokenizers by Megatron's ``--tokenizer-type`` and the flags beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mb_data.tokenizer.base import Tokenizer
from mb_data.tokenizer.load import BERT, existing, load_tokenizer
from mb_data.tokenizer.rank_files import from_megatron_ranks

# What each type is made from, of the arguments below; as in Megatron it pays the others no heed.
MADE_FROM = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": (
        "tokenizer_model", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens",
        "tiktoken_special_tokens",
    ),
    "NullTokenizer": ("vocab_size",),
}  # fmt: skip
MEGATRON_TYPES = tuple(MADE_FROM)


def megatron_tokenizer(
    kind: str,
    *,
    vocab_file: str | os.PathLike[str] | None = None,
    merge_file: str | os.PathLike[str] | None = None,
    tokenizer_model: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    tiktoken_special_tokens: Sequence[str] | None = None,
    num_extra_ids: int = 0,
    eod_token: str | None = None,
    engine: str = "auto",
) -> Tokenizer:
    """The tokenizer Megatron builds for ``--tokenizer-type`` and the flags beside it.

    Without files ``GPT2BPETokenizer`` and ``BertWordPieceLowerCase`` are those in this package.
    Arguments are Megatron's flags of these names; ``num_extra_ids``, ``eod_token`` and ``engine``
    are as for ``load_tokenizer``. Raises ValueError for an unknown type or a file the type needs.
    """
    if kind not in MEGATRON_TYPES:
        raise ValueError(f"tokenizer type {kind!r}: expected one of {', '.join(MEGATRON_TYPES)}")
    embedded = kind in ("GPT2BPETokenizer", "BertWordPieceLowerCase") and vocab_file is None
    if embedded and tokenizer_model is not None:
        raise ValueError(
            f"{kind} is read from --vocab-file, or is the one in this package without files; got "
            f"--tokenizer-model {os.fspath(tokenizer_model)}"
        )
    options: dict[str, Any] = {"engine": engine, "num_extra_ids": num_extra_ids}
    if kind == "TikTokenizer":
        options |= {
            "vocab_size": vocab_size,
            "tiktoken_pattern": tiktoken_pattern,
            "tiktoken_num_special_tokens": tiktoken_num_special_tokens,
            "tiktoken_special_tokens": tiktoken_special_tokens,
        }
        return _ranks(_needed(kind, tokenizer_model), eod_token, options)
    options["eod_token"] = eod_token
    if kind == "GPT2BPETokenizer":
        return _gpt2(vocab_file, merge_file, options)
    if kind.startswith("BertWordPiece"):
        return _bert(kind, vocab_file, options)
    if kind == "NullTokenizer":
        if vocab_size is None:
            raise ValueError(f"{kind} needs --vocab-size")
        return load_tokenizer(f"null:{vocab_size}", **options)
    model = _needed(kind, tokenizer_model)
    if kind in ("Llama2Tokenizer", "HuggingFaceTokenizer"):
        return _with_bos(kind, model, options)
    return load_tokenizer(model, add_roles=kind == "SentencePieceTokenizer", **options)


def _needed(kind: str, tokenizer_model: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    if tokenizer_model is None:
        raise ValueError(f"{kind} needs --tokenizer-model")
    return tokenizer_model


def _gpt2(
    vocab_file: str | os.PathLike[str] | None,
    merge_file: str | os.PathLike[str] | None,
    options: dict[str, Any],
) -> Tokenizer:
    if vocab_file is None and merge_file is None:
        return load_tokenizer("gpt2", **options)
    if vocab_file is None or merge_file is None:
        raise ValueError("GPT2BPETokenizer needs both --vocab-file and --merge-file, or neither")
    files = (existing(vocab_file), existing(merge_file))
    return load_tokenizer(os.pathsep.join(map(str, files)), **options)


def _bert(
    kind: str, vocab_file: str | os.PathLike[str] | None, options: dict[str, Any]
) -> Tokenizer:
    lower_case = kind == "BertWordPieceLowerCase"
    if vocab_file is not None:
        return load_tokenizer(vocab_file, lower_case=lower_case, **options)
    if lower_case:
        return load_tokenizer(BERT, **options)
    raise ValueError(f"{kind} needs --vocab-file")


def _ranks(
    model: str | os.PathLike[str], eod_token: str | None, settings: dict[str, Any]
) -> Tokenizer:
    kind = "TikTokenizer"
    if settings["tiktoken_pattern"] is None:
        raise ValueError(f"{kind} needs --tiktoken-pattern, v1 or v2")
    if eod_token is not None:
        raise ValueError(f"{kind} ends documents with </s>; --eod-token is not for it")
    name = os.fspath(model)
    data = existing(name).read_bytes()
    fingerprint = hashlib.sha256(data).hexdigest()
    tokenizer: Tokenizer = from_megatron_ranks(
        name, Path(name), data, fingerprint=fingerprint, **settings
    )
    tokenizer.rebuild = partial(megatron_tokenizer, kind, tokenizer_model=name, **settings)
    return tokenizer


def _with_bos(kind: str, model: str | os.PathLike[str], options: dict[str, Any]) -> Tokenizer:
    """Llama 2's, which begins every document, or a Hugging Face file that says whether it does."""
    tokenizer = load_tokenizer(model, **options)
    tokenizer.prepend_bos = kind == "Llama2Tokenizer" or tokenizer.begins_with is not None
    if tokenizer.begins_with is not None:
        tokenizer.special["bos"] = tokenizer.begins_with
    tokenizer.rebuild = partial(
        megatron_tokenizer, kind, tokenizer_model=os.fspath(model), **options
    )
    return tokenizer
