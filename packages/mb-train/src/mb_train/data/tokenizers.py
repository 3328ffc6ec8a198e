"""The tokenizer of a run, and how its texts begin and end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mb_train.config import TrainConfig, flag_name
from mb_train.data.tokenizer_files import GENERATION, found_files, tokenizer_files
from mb_train.untrusted import json_of

if TYPE_CHECKING:
    from mb_data import ChatTokenizer, Tokenizer


def load_tokenizer(config: TrainConfig, run: Path | None = None) -> Tokenizer:
    """The one of `--tokenizer`, or that of Megatron's flags; without either its default.

    Args:
        run: folder of the run that `config` is from, with its copies; see `copies_for`.

    Raises:
        ValueError: an unknown name, a file that is no vocabulary, a file that is missing, or a
            library that reads it.
        OSError: no such file.
    """
    try:
        return _load(dataclasses.replace(config, **found_files(config, run)))
    except (ValueError, ModuleNotFoundError) as error:
        names = ("tokenizer", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
        given = [n for n in (*names, "eod_token", "vocab_extra_ids") if getattr(config, n)]
        said = " ".join(f"{flag_name(n)} {getattr(config, n)}" for n in given)
        raise ValueError(f"{said}: {error}") from error


def beginning(tokenizer: Tokenizer) -> list[int]:
    """The tokens that documents begin with, before those of their text."""
    return [tokenizer.bos] if tokenizer.prepend_bos else []


def preceding(tokenizer: Tokenizer) -> list[int]:
    """What a text stands behind, a token at least: `beginning`, else the end of a document.

    Raises:
        ValueError: the tokenizer has neither.
    """
    return beginning(tokenizer) or [tokenizer.eod]


def further_ends(config: TrainConfig, run: Path | None = None) -> list[int]:
    """Tokens that end a text beside the tokenizer's own: those that the generation_config.json
    which belongs to it names, as a chat model's of Llama or Qwen. `run` as in `load_tokenizer`.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be read.
    """
    found: list[int] = []
    for path in tokenizer_files(config, run):
        file = path / GENERATION if path.is_dir() else path
        if file.name != GENERATION or not file.is_file():
            continue
        try:
            named = json_of(file.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} is damaged: {error}.") from None
        ends = named if isinstance(named, list) else [] if named is None else [named]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
            raise ValueError(
                f"Expected eos_token_id of {file} to be a token or a list of tokens, got {named!r}."
            )
        found += ends
    return found


def chat_tokenizer(config: TrainConfig, run: Path | None = None) -> ChatTokenizer:
    """The run's tokenizer with its chat template; `run` as in `load_tokenizer`.

    Raises:
        ValueError: it has none, or a library that reads it is missing.
    """
    import mb_data

    files = tokenizer_files(config, run)
    described = [path for path in files if path.name == "tokenizer.json" or path.is_dir()]
    if not described:
        raise ValueError(
            "Expected the tokenizer of a chat model, a folder with tokenizer.json and its chat "
            f"template, got {config.tokenizer or config.tokenizer_type or 'gpt2'}."
        )
    try:
        return mb_data.ChatTokenizer(described[0])
    except ModuleNotFoundError as missing:
        raise ValueError(str(missing)) from None


def _load(config: TrainConfig) -> Tokenizer:
    import mb_data

    # Documents of the other models have no end, and their tokenizers often none to write.
    shared: dict[str, Any] = {
        "num_extra_ids": config.vocab_extra_ids,
        "eod_token": config.eod_token if config.model == "gpt" else None,
    }
    kind = "GPT2BPETokenizer" if config.model == "gpt" else "BertWordPieceLowerCase"
    if config.tokenizer is not None:
        return mb_data.load_tokenizer(config.tokenizer, **shared)
    if config.tokenizer_model is not None:
        kind = "SentencePieceTokenizer"
    return mb_data.megatron_tokenizer(
        config.tokenizer_type or kind,
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        tokenizer_model=config.tokenizer_model,
        vocab_size=config.vocab_size,
        tiktoken_pattern=config.tiktoken_pattern,
        tiktoken_num_special_tokens=config.tiktoken_num_special_tokens,
        tiktoken_special_tokens=config.tiktoken_special_tokens,
        **shared,
    )
