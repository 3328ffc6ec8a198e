"""The task that `--model` names."""

from __future__ import annotations

from typing import Any

from mb_parallel import ParallelMesh

from mb_train.config import TrainConfig
from mb_train.tasks.base import Task
from mb_train.tasks.bert import BertTask
from mb_train.tasks.gpt import GPTTask
from mb_train.tasks.ict import ICTTask
from mb_train.tasks.t5 import T5Task


def make_task(config: TrainConfig, tokenizer: Any, *, vocab_size: int, mesh: ParallelMesh) -> Task:
    """What a run trains.

    Args:
        config: the run.
        tokenizer: of its data.
        vocab_size: padded.
        mesh: its ranks.

    Raises:
        ValueError: sizes or options that do not fit the model.
    """
    if config.model == "bert":
        return BertTask(config, tokenizer, vocab_size=vocab_size)
    if config.model == "t5":
        return T5Task(config, tokenizer, vocab_size=vocab_size)
    if config.model == "ict":
        return ICTTask(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
    return GPTTask(config, vocab_size=vocab_size, eod=tokenizer.eod)
