"""The task that `--model` names."""

from __future__ import annotations

from typing import Any

import torch
from mb_parallel import ParallelDims, ParallelMesh
from torch import nn

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
        return T5Task(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
    if config.model == "ict":
        return ICTTask(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
    return GPTTask(config, vocab_size=vocab_size, eod=tokenizer.eod)


def whole_model(
    config: TrainConfig, *, vocab_size: int, compute_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a run on one process, with fresh weights on the default device.

    Raises:
        ValueError: sizes or options that do not fit the model.
    """
    task = one_process_task(config, None, vocab_size=vocab_size)
    return task.build_model(compute_dtype=compute_dtype)


def one_process_task(config: TrainConfig, tokenizer: Any, *, vocab_size: int) -> Task:
    """The task of a run, as it is on one process; without a tokenizer it knows no text.

    Raises:
        ValueError: sizes or options that do not fit the model.
    """
    if config.model == "gpt" and tokenizer is None:
        return GPTTask(config, vocab_size=vocab_size, eod=-1)
    mesh = ParallelDims().build("cpu")
    return make_task(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
