"""The tokenizer of a run, whose files the run folder keeps a copy of, and its vocabulary's rows.

A model is of no use without the words it was trained on, and flags name their files as they lay
where the run was started: often by a path from a folder that nobody is in later. Where a file is no
longer there the copy takes its place.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mb_train.config import TrainConfig, flag_name
from mb_train.folder.run_folder import TOKENIZER, checkpoint_in, read_saved_run
from mb_train.untrusted import json_of

if TYPE_CHECKING:
    from mb_data import Tokenizer

    from mb_train.folder.start import Start

# What belongs together in a folder of Hugging Face's: words, and what is said of them.
_WORDS = (
    "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
_GENERATION = "generation_config.json"
_ABOUT = (
    "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    _GENERATION,
)  # fmt: skip
TOKENIZER_FILES = (*_WORDS, *_ABOUT)
# Names that mb-data knows, whatever files there are.
_NAMES = ("gpt2", "bert-base-uncased", "null")
# Megatron's types whose special tokens, or beginning of texts, are said beside the file.
_OF_A_FOLDER = ("HuggingFaceTokenizer", "Llama2Tokenizer")
# Fields that name a file, or `--tokenizer` a folder, or two files as PATH does.
_FIELDS = ("tokenizer", "vocab_file", "merge_file", "tokenizer_model")


def load_tokenizer(config: TrainConfig, run: Path | None = None) -> Tokenizer:
    """The one of `--tokenizer`, or that of Megatron's flags; without either its default.

    Args:
        run: folder of the run that `config` is from, with its copies; see `copies_for`.

    Raises:
        ValueError: an unknown name, a file that is no vocabulary, or a file that is missing.
        OSError: no such file.
    """
    try:
        return _load(dataclasses.replace(config, **_found(config, run)))
    except ValueError as error:
        names = ("tokenizer", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
        given = [n for n in (*names, "eod_token", "vocab_extra_ids") if getattr(config, n)]
        said = " ".join(f"{flag_name(n)} {getattr(config, n)}" for n in given)
        raise ValueError(f"{said}: {error}") from error


def vocabulary_of(config: TrainConfig, start: Start | None, *, ranks: int) -> tuple[Tokenizer, int]:
    """The tokenizer that a run begins with, and V, the rows that its model has for it.

    Args:
        start: what it goes on from.
        ranks: tensor-parallel ones, which share the rows.

    Raises:
        ValueError: see `load_tokenizer` and `vocabulary_rows`.
        OSError: no such file.
    """
    tokenizer = load_tokenizer(config, copies_for(config, start))
    saved = _saved_rows(config, start)
    return tokenizer, vocabulary_rows(config, tokenizer.vocab_size, ranks=ranks, saved=saved)


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
        file = path / _GENERATION if path.is_dir() else path
        if file.name != _GENERATION or not file.is_file():
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


def tokenizer_files(config: TrainConfig, run: Path | None = None) -> list[Path]:
    """The files that a run's tokenizer was made from, and those that belong to them.

    A folder comes as a path of its own. None for the tokenizers that come with mb-data.
    """
    files = []
    for field, named in _found(config, run).items():
        for path in map(Path, _paths(named, run)):
            if path.is_file() and (field == "tokenizer" or config.tokenizer_type in _OF_A_FOLDER):
                # Words of another name are the tokenizer, whatever words lie beside them.
                beside = TOKENIZER_FILES if path.name in _WORDS else _ABOUT
                files += [path, *(path.with_name(name) for name in beside)]
            elif path.exists():
                files.append(path)
    return [path for path in dict.fromkeys(files) if path.exists()]


def copies_for(config: TrainConfig, start: Start | None) -> Path | None:
    """The run folder whose copies take the place of files that are gone: of the run that this one
    goes on from, or of the BERT that it begins with. None where there is neither.

    Raises:
        ValueError: a --bert-load without a checkpoint.
    """
    if start is not None:
        return start.run
    checkpoint = _bert_of(config)
    return None if checkpoint is None else checkpoint.parent


def _bert_of(config: TrainConfig) -> Path | None:
    """The checkpoint of `--bert-load`; None without one, and for a folder of Hugging Face's."""
    if config.bert_load is None or (Path(config.bert_load) / "config.json").is_file():
        return None
    try:
        return checkpoint_in(Path(config.bert_load))
    except ValueError as error:
        raise ValueError(f"--bert-load: {error}") from error


def keep_tokenizer(config: TrainConfig, folder: Path, run: Path | None = None) -> None:
    """Copy a tokenizer's files into a run folder; `run` as in `load_tokenizer`."""
    for path in tokenizer_files(config, run):
        copies = [(path, folder / TOKENIZER / path.name)]
        if path.is_dir():
            there = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
            copies = [(file, copies[0][1] / file.name) for file in there]
        for file, copy in copies:
            if not copy.exists() or not copy.samefile(file):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _saved_rows(config: TrainConfig, start: Start | None) -> int:
    """Rows of the vocabulary whose weights a run begins with: its own of before, or those of the
    BERT of `--bert-load`. 0: of none, or of a folder of Hugging Face's, which gets what is asked.
    """
    saved = None if start is None else start.saved
    if saved is None and (checkpoint := _bert_of(config)) is not None:
        saved = read_saved_run(checkpoint)
    return 0 if saved is None else saved.vocab_rows


def vocabulary_rows(config: TrainConfig, tokens: int, *, ranks: int, saved: int = 0) -> int:
    """V: as the flags pad it, or as a checkpoint has it, if tensor-parallel ranks can share that.

    Args:
        tokens: of the tokenizer.
        saved: rows of the checkpoint that weights come from; 0 for none.

    Raises:
        ValueError: they cannot.
    """
    if saved < tokens:
        import mb_data

        multiple = config.make_vocab_size_divisible_by
        return mb_data.padded_vocab_size(tokens, divisible_by=multiple, tensor_parallel=ranks)
    if saved % ranks:
        raise ValueError(
            f"Expected a vocabulary that {ranks} tensor-parallel ranks can share, got one of "
            f"{saved:,} rows in the checkpoint. mb-train convert makes more of them, of a Hugging "
            "Face folder: --make-vocab-size-divisible-by 128."
        )
    return saved


def _found(config: TrainConfig, run: Path | None) -> dict[str, str]:
    """By field, the files and folders that it names, or their copies where they are gone."""
    named = {field: getattr(config, field) for field in _FIELDS}
    return {
        field: os.pathsep.join(_paths(value, run))
        for field, value in named.items()
        if value and value.partition(":")[0] not in _NAMES
    }


def _paths(value: str, run: Path | None) -> list[str]:
    """One path, or two with ``:`` between them where the first is there: folders have ``:`` too."""

    def there(part: str) -> str:
        copy = None if run is None else run / TOKENIZER / Path(part).name
        return part if copy is None or Path(part).exists() or not copy.exists() else str(copy)

    parts = [there(part) for part in value.split(os.pathsep)]
    return parts if Path(parts[0]).is_file() else [there(value)]


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
