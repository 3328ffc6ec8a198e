"""The task that `--model` names."""

from __future__ import annotations

from typing import Any

import mb_data
import torch
from mb_parallel import ParallelDims, ParallelMesh
from torch import nn

from mb_train.config import TrainConfig
from mb_train.tasks.base import Task
from mb_train.tasks.bert import BertTask
from mb_train.tasks.classify import ClassifyTask
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
    if config.model == "classifier":
        return ClassifyTask(config, tokenizer, vocab_size=vocab_size)
    if config.model == "ict":
        return ICTTask(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
    marks = _middle_tokens(config, tokenizer) if config.fim_data else None
    return GPTTask(config, vocab_size=vocab_size, eod=tokenizer.eod, marks=marks)


def _middle_tokens(config: TrainConfig, tokenizer: Any) -> mb_data.MiddleTokens:
    """Ids of the marks of fill-in-the-middle.

    Raises:
        ValueError: the vocabulary has no such token.
    """
    ids = {}
    for part in mb_data.MiddleTokens._fields:
        text = getattr(config, f"fim_{part}_token")
        ids[part] = tokenizer.token_id(text)
        if ids[part] is None:
            raise ValueError(
                f"Expected --fim-{part}-token to be a special token of {tokenizer.name}, got "
                f"{text!r}. Name one that it has, or append some: --vocab-extra-ids 3 makes "
                "<extra_id_0> to <extra_id_2>."
            )
    return mb_data.MiddleTokens(**ids)


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
