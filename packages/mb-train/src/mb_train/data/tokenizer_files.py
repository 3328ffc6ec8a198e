"""The files of a run's tokenizer, of which the run folder keeps copies.

A model is of no use without the words it was trained on, and flags name their files as they lay
where the run was started: often by a path from a folder that nobody is in later. Where a file is no
longer there the copy takes its place.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mb_train.config import TrainConfig
from mb_train.folder.run_folder import TOKENIZER, checkpoint_in
from mb_train.folder.whole_files import replaced

if TYPE_CHECKING:
    from mb_train.folder.start import Start

# What belongs together in a folder of Hugging Face's: words, and what is said of them.
_WORDS = (
    "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip
GENERATION = "generation_config.json"
_ABOUT = (
    "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
    GENERATION,
)  # fmt: skip
TOKENIZER_FILES = (*_WORDS, *_ABOUT)
# Names that mb-data knows, whatever files there are.
_NAMES = ("gpt2", "bert-base-uncased", "null")
# Megatron's types whose special tokens, or beginning of texts, are said beside the file.
_OF_A_FOLDER = ("HuggingFaceTokenizer", "Llama2Tokenizer")
# Fields that name a file, or `--tokenizer` a folder, or two files as PATH does.
_FIELDS = ("tokenizer", "vocab_file", "merge_file", "tokenizer_model")


def tokenizer_files(config: TrainConfig, run: Path | None = None) -> list[Path]:
    """The files that a run's tokenizer was made from, and those that belong to them.

    A folder comes as a path of its own. None for the tokenizers that come with mb-data.
    """
    files = []
    for field, named in found_files(config, run).items():
        for path in map(Path, _paths(named, run)):
            if path.is_file() and (field == "tokenizer" or config.tokenizer_type in _OF_A_FOLDER):
                # Words of another name are the tokenizer, whatever words lie beside them.
                beside = TOKENIZER_FILES if path.name in _WORDS else _ABOUT
                files += [path, *(path.with_name(name) for name in beside)]
            elif path.exists():
                files.append(path)
    return [path for path in dict.fromkeys(files) if path.exists()]


def found_files(config: TrainConfig, run: Path | None) -> dict[str, str]:
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


def copies_for(config: TrainConfig, start: Start | None) -> Path | None:
    """The run folder whose copies take the place of files that are gone: of the run that this one
    goes on from, or of the BERT that it begins with. None where there is neither.

    Raises:
        ValueError: a --bert-load without a checkpoint.
    """
    if start is not None:
        return start.run
    checkpoint = bert_checkpoint(config)
    return None if checkpoint is None else checkpoint.parent


def bert_checkpoint(config: TrainConfig) -> Path | None:
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
            # A run that goes on leaves the copy that it has, the only one perhaps before long.
            if not copy.exists() or not filecmp.cmp(file, copy, shallow=False):
                copy.parent.mkdir(parents=True, exist_ok=True)
                with replaced(copy) as draft:
                    shutil.copyfile(file, draft)
