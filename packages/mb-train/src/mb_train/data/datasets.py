"""Datasets of a run, from the token files that its flags name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mb_data import Tokenizer

from mb_train.config import TrainConfig
from mb_train.data.batches import beyond_tokenizer, check_tokens
from mb_train.data.ends import without_ends
from mb_train.data.named import Named, named_data
from mb_train.data.same import identity
from mb_train.data.sample import sample_corpus
from mb_train.machine.rank_zero import on_rank_zero_first
from mb_train.tasks import Dataset, Task

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
    named = named_data(config)
    if not named and config.sft:
        raise ValueError("Expected --data-path, what mb-data chats wrote, with --sft, got none.")
    if not named:
        corpus = on_rank_zero_first(
            lambda: sample_corpus(
                tokenizer,
                task,
                folder,
                say,
                mock=config.mock_data,
                own_end=config.eod_token is None,
            )
        )
        named = {"": Named([corpus], "the sample corpus")}
    paths = {part: None if data is None else data.words for part, data in named.items()}
    sources = [data for data in named.values() if data is not None]
    split = f" with --split {config.split}" if "" in named else ""
    evaluated = config.eval_iters * batch_size or None  # what nobody looks at is not built
    train, valid, test = on_rank_zero_first(
        lambda: task.build_datasets(paths.get("") or paths, (samples, evaluated, evaluated))
    )
    if train is None:
        prefixes = " ".join(prefix for data in sources for prefix in data.prefixes)
        raise ValueError(f"Expected documents to train on, got none from {prefixes}{split}.")
    if valid is None and evaluated:
        say(f"data: no evaluations, since there is no document for them{split}")
    prefixes = [prefix for data in sources for prefix in data.prefixes]
    for line in without_ends(config, prefixes, tokenizer):
        say(line)
    files = [file for data in sources for file in data.files]
    first = task.collate([train[i] for i in range(min(len(train), _LOOKED_AT))])
    check_tokens(first, vocab_size)
    for line in beyond_tokenizer(first, tokenizer):
        say(line)
    cyclic = config.dataloader_type == "cyclic"
    shown = identity(train, files, sources[0].weights(), cyclic=cyclic)
    return Data(train, valid, test, shown)
