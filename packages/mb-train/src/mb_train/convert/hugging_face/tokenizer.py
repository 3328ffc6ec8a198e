"""The tokenizer of a Hugging Face folder: which of its files it is, and which a run's become."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import mb_data

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import read_object
from mb_train.data.tokenizer_files import TOKENIZER_FILES, tokenizer_files
from mb_train.folder.whole_files import write_text

_CASED = "BertWordPieceCase"
# What a tokenizer is made of; the first that is there.
_MAIN_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def find_tokenizer(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """How a run names the tokenizer of a folder, and the files that belong to it.

    Raises:
        ValueError: there is none, a file is damaged, or a library that reads it is missing.
    """
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    main = next((folder / name for name in _MAIN_FILES if folder / name in files), None)
    if main is None:
        raise ValueError(f"Expected a tokenizer in {folder}, found none. Give --tokenizer.")
    return _fields(main), files


def named_tokenizer(name: str) -> dict[str, Any]:
    """How a run names the tokenizer of `--tokenizer`.

    Raises:
        ValueError: a file is damaged, or a library that reads it is missing.
    """
    return _fields(Path(name)) if Path(name).is_file() else {"tokenizer": name}


def _fields(file: Path) -> dict[str, str]:
    """How a run names a tokenizer.

    A bare list of words does not say whether it is cased, and a vocabulary not whether texts begin
    with a token of their own, as Llama's do.
    """
    beside = file.with_name("tokenizer_config.json")
    about = read_object(beside) if beside.is_file() else {}
    if file.name == "vocab.txt" and not about.get("do_lower_case", True):
        return {"tokenizer_type": _CASED, "vocab_file": str(file)}
    if file.suffix == ".model" and about.get("add_bos_token") is True:
        return {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(file)}
    try:
        begins = file.suffix == ".json" and mb_data.load_tokenizer(file).begins_with is not None
    except ModuleNotFoundError as missing:
        raise ValueError(str(missing)) from None
    if begins:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(file)}
    return {"tokenizer": str(file)}


def write_tokenizer(
    config: TrainConfig, tokenizer: mb_data.Tokenizer, run: Path, target: Path
) -> bool:
    """Put the tokenizer's files there under the names that transformers knows; False: none.

    What is inside mb-data is no file, and a bare vocabulary does not say how it is used: these are
    written as a tokenizer.json.
    """
    files = tokenizer_files(config, run)
    inside = [path / name for path in files if path.is_dir() for name in TOKENIZER_FILES]
    known = {".json": "tokenizer.json", ".txt": "vocab.txt"}
    if config.merge_file is not None or os.pathsep in (config.tokenizer or ""):
        known = {".json": "vocab.json", ".txt": "merges.txt"}
    known[".model"] = "spiece.model" if config.model == "t5" else "tokenizer.model"
    files = [path for path in (*files, *inside) if path.is_file()]
    for path in files:
        theirs = path.name in TOKENIZER_FILES
        name = path.name if theirs else known.get(path.suffix, path.name)
        if not (target / name).exists():  # what is named comes before what lies beside it
            shutil.copyfile(path, target / name)
    made = {}
    if not any((target / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        made = mb_data.hugging_face_files(tokenizer, sentences=config.model == "bert")
        for name, text in made.items():
            write_text(target / name, text)
    return bool(files or made)
