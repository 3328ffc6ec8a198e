"""Datasets of a run, from the token files that its flags name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mb_data
import numpy as np
import torch.distributed as dist
from mb_data import Tokenizer
from mb_data.indexed_dataset import similar_prefixes
from mb_parallel import rank, world_size

from mb_train.config import TrainConfig
from mb_train.config.data import weights_and_prefixes
from mb_train.data.batches import check_tokens
from mb_train.data.same import identity
from mb_train.data.sample import sample_corpus
from mb_train.tasks import Dataset, Task

T = TypeVar("T")

# Samples whose tokens are looked at before a run begins; the others when they are read.
_LOOKED_AT = 8


@dataclass(frozen=True)
class Data:
    """Datasets of a run, and the `same.identity` of what they are made from."""

    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    identity: dict[str, Any]


def prepare_data(
    config: TrainConfig,
    task: Task,
    batch_size: int,
    samples: int,
    folder: Path,
    say: Callable[[str], None],
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
) -> Data:
    """Find or make the token files, and build the datasets over them.

    Evaluation always takes the first `eval_iters` batches of its set, so that two evaluations are
    comparable and a resumed run repeats those of an uninterrupted one.

    Args:
        task: builds the datasets over the files.
        batch_size: sequences of a step, over all ranks.
        samples: sequences of the whole training.
        folder: where the sample corpus is kept.
        say: prints a line of progress.
        tokenizer: of the sample corpus.
        vocab_size: of the model.

    Raises:
        ValueError: no training documents, a damaged file, or tokens of another vocabulary.
        OSError: a file that cannot be read.
    """
    parts = _words_by_part(config)
    if not parts:
        corpus = on_rank_zero_first(
            lambda: sample_corpus(tokenizer, task, folder, say, mock=config.mock_data)
        )
        parts = {"": [corpus]}
    if config.reads_token_files:
        parts = {part: words and _weighed(words) for part, words in parts.items()}
    prefixes = [
        prefix for words in parts.values() for prefix in _weights_and_prefixes(config, words)[1]
    ]
    split = f" with --split {config.split}" if "" in parts else ""
    evaluated = config.eval_iters * batch_size or None  # what nobody looks at is not built
    train, valid, test = on_rank_zero_first(
        lambda: task.build_datasets(parts.get("") or parts, (samples, evaluated, evaluated))
    )
    if train is None:
        raise ValueError(
            f"Expected documents to train on, got none from {' '.join(prefixes)}{split}."
        )
    if valid is None and evaluated:
        say(f"data: no evaluations, since there is no document for them{split}")
    weights, _ = _weights_and_prefixes(config, parts["" if "" in parts else "train"])
    files = [Path(prefix + _suffixes(config)[0]) for prefix in prefixes]
    first = task.collate([train[i] for i in range(min(len(train), _LOOKED_AT))])
    check_tokens(first, vocab_size)
    return Data(train, valid, test, identity(train, files, weights))


def check_files(config: TrainConfig, earlier: str = ".") -> None:
    """Raise ValueError if a file of the data that the flags name is missing, or taken for a weight.

    Apart from `prepare_data`, since it can be asked before a model is built, which takes minutes.

    Args:
        earlier: the directory in which the run was until now.
    """
    if config.model == "ict" and config.titles_data_path is not None:
        check_prefixes([config.titles_data_path], (".bin", ".idx"), "--titles-data-path", earlier)
    for part, words in _words_by_part(config).items():
        if words is None:
            continue
        weights, prefixes = _weights_and_prefixes(config, words)
        check_prefixes(prefixes, _suffixes(config), _named_by(config, part), earlier)
        for word in words[::2] if weights else []:
            if Path(f"{word}.bin").is_file():
                raise ValueError(
                    f"Expected {_named_by(config, part)} to be prefixes alone, or weights and "
                    f"prefixes by turns, got {word} where a weight is due, and there is "
                    f"{word}.bin. Write ./{word} for a prefix."
                )


def _words_by_part(config: TrainConfig) -> dict[str, list[str] | None]:
    """What names the data of each part; "" is of what is split into parts. {} if nothing does."""
    words = config.data_words()
    return config.data_by_part() or ({} if words is None else {"": words})


def _weights_and_prefixes(
    config: TrainConfig, words: list[str] | None
) -> tuple[list[float], list[str]]:
    """See `config.data`; text has no weights, and a part that is not named neither."""
    if not words or not config.reads_token_files:
        return [], words or []
    return weights_and_prefixes(words)


def _weighed(words: list[str]) -> list[str]:
    """Several prefixes without weights get their numbers of tokens as weights."""
    if len(words) == 1 or weights_and_prefixes(words)[0]:
        return words
    tokens = [int(mb_data.IndexedDataset(prefix).sizes.sum(dtype=np.int64)) for prefix in words]
    # An empty one weighs something too: it is left out of the blend with a warning.
    weights = (str(max(count, 1)) for count in tokens)
    return [word for pair in zip(weights, words, strict=True) for word in pair]


def _suffixes(config: TrainConfig) -> tuple[str, ...]:
    """Of the files of a data set; text is named whole."""
    return (".bin", ".idx") if config.reads_token_files else ("",)


def _named_by(config: TrainConfig, part: str) -> str:
    """The flag, or the file, that names the data of a part; "" is of what is split into parts."""
    file = config.per_split_data_args_path or config.data_args_path
    return file or (f"--{part}-data-path" if part else "--data-path")


def check_prefixes(
    prefixes: list[str], suffixes: tuple[str, ...], source: str, earlier: str = "."
) -> None:
    """Refuse data sets whose files are not there; `source` is the flag or file that names them.

    Relative paths are kept as they are, as in Megatron, so that data and runs can move together;
    if there is a data set from the directory `earlier` on, the error says so.
    """
    if not prefixes:
        raise ValueError(f"Expected {source} to name a data set, got none.")
    for prefix in prefixes:
        for suffix in suffixes:
            path = Path(prefix + suffix)
            if not (path.is_file() if suffix else path.exists()):
                way = "Give the path without .bin, and make the files with mb-data preprocess."
                if similar := similar_prefixes(prefix):
                    way = f"There is {', '.join(similar)}."
                if Path(earlier, path).exists():
                    way = f"It is in {earlier}, where the run was until now: go there, or name "
                    way += "the data anew."
                where = "" if Path(prefix).is_absolute() else f" in {Path.cwd()}"
                raise ValueError(
                    f"Expected {prefix}{suffix} to be a file (from {source}), "
                    f"found none{where}.{f' {way}' if suffix else ''}"
                )


def on_rank_zero_first(make: Callable[[], T]) -> T:
    """Rank 0 makes the files, the others find them made; a failure on rank 0 fails all."""
    if world_size() == 1:
        return make()
    result = failure = told = None  # `told` is what the other ranks hear
    if rank() == 0:
        try:
            result = make()
        except (ValueError, OSError) as error:
            failure = told = error
        except Exception as error:  # unforeseen: rank 0 shows it, the others must not wait for it
            said = f"Making the data failed on rank 0: {type(error).__name__}: {error}"
            failure, told = error, RuntimeError(said)
    verdict = [told]
    dist.broadcast_object_list(verdict, src=0)
    if failure is not None:
        raise failure
    if verdict[0] is not None:
        raise verdict[0]
    return make() if result is None else result
