"""The task that `--model` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mb_parallel import ParallelDims, ParallelMesh
from torch import nn

from mb_train.config import TrainConfig
from mb_train.models.fp32 import fp32_by_default
from mb_train.tasks.base import Task
from mb_train.tasks.bert import BertTask
from mb_train.tasks.classify import ClassifyTask
from mb_train.tasks.collate import LEAST_STEP
from mb_train.tasks.conversations import ConversationTask
from mb_train.tasks.gpt import GPTTask, fill_in_the_middle
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
    if config.model == "gpt":
        try:
            eod = tokenizer.eod
        except ValueError:  # which names a flag of mb-data's
            raise ValueError(
                "Expected a tokenizer with a token for the end of a document with --model gpt, got "
                f"{tokenizer.name}, which has none. Give the one that the data was made with, or "
                "name the --eod-token that it was made with, or take another --model."
            ) from None
        if config.sft:
            return ConversationTask(config, vocab_size=vocab_size, eod=eod, mesh=mesh)
        fim = fill_in_the_middle(config, tokenizer) if config.fim_data else None
        return GPTTask(config, vocab_size=vocab_size, eod=eod, rearranged=fim, mesh=mesh)
    kinds: dict[str, Callable[..., Task]] = {
        "bert": BertTask, "t5": T5Task, "classifier": ClassifyTask,
        "ict": partial(ICTTask, mesh=mesh),
    }  # fmt: skip
    leave_out = leaves_padding_out(config, mesh.dims)
    return kinds[config.model](config, tokenizer, vocab_size=vocab_size, leave_out=leave_out)


def leaves_padding_out(config: TrainConfig, dims: ParallelDims) -> bool:
    """Whether blocks may see a batch without its padding, as one sequence of any length.

    Not where others count on the shape: what crosses the border of a pipeline's stages, ranks that
    bring equal numbers of tokens to each other's experts, a balance within each sequence, ranks
    that share the tokens out (sequence parallelism) and are no divisor of such a length.
    """
    sharing = dims.tp if config.sequence_parallel else 1
    alone = dims.pp == 1 and dims.ep == 1 and LEAST_STEP % sharing == 0
    return alone and config.moe_balance_over != "sequence"


def whole_model(
    config: TrainConfig, *, vocab_size: int, compute_dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a run on one process, with fresh fp32 weights on the default device.

    Raises:
        ValueError: sizes or options that do not fit the model.
    """
    task = one_process_task(config, None, vocab_size=vocab_size)
    with fp32_by_default():
        return task.build_model(compute_dtype=compute_dtype)


def one_process_task(config: TrainConfig, tokenizer: Any, *, vocab_size: int) -> Task:
    """The task of a run, as it is on one process; without a tokenizer it knows no text.

    Raises:
        ValueError: sizes or options that do not fit the model.
    """
    if config.model == "gpt" and tokenizer is None:
        return GPTTask(config, vocab_size=vocab_size, eod=-1)
    mesh = ParallelMesh(ParallelDims(), None, None, None)  # though there be other ranks
    return make_task(config, tokenizer, vocab_size=vocab_size, mesh=mesh)
