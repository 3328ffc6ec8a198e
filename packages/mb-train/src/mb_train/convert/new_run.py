"""A run folder that begins with a model from elsewhere: configuration, checks, checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mb_layers.on_demand import Changed, outlines
from torch import Tensor

from mb_train.checkpoint.finite import all_finite
from mb_train.config import TrainConfig
from mb_train.convert.vocabulary import rows_of
from mb_train.data.tokenizer_files import keep_tokenizer
from mb_train.data.tokenizers import load_tokenizer
from mb_train.folder.lock import locked
from mb_train.folder.run_folder import (
    FORMAT,
    TOKENIZER,
    SavedRun,
    checkpoints,
    has_name_of_a_checkpoint,
)
from mb_train.logs.megatron_lines import saved_line, saving_line
from mb_train.models.unfilled import unfilled
from mb_train.tasks.make import whole_model

# What a TrainConfig needs beside its model; an imported model has no run of its own yet.
_TRAINING = {"micro_batch_size": 1, "lr": 1e-5, "train_iters": 1}
# fp8 and integers stand for numbers only with scales, which lie elsewhere.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def imported_config(fields: Mapping[str, Any], vocab_size: int, **also: Any) -> TrainConfig:
    """A configuration for an imported model: the model, and a run to be overruled by flags.

    Args:
        vocab_size: rows of its token embedding.
        also: further fields.
    """
    beside: dict[str, Any] = {
        **_TRAINING,
        "seq_length": fields["max_position_embeddings"],
        "make_vocab_size_divisible_by": vocab_size,
    }
    return TrainConfig(**{**beside, **fields, **also})


def shapes_of(config: TrainConfig, vocab_size: int) -> dict[str, torch.Size]:
    """The shapes of a model's weights, by our names."""
    with unfilled():
        model = whole_model(config, vocab_size=vocab_size)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def in_fp32(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], folder: Path
) -> Mapping[str, Tensor]:
    """Weights, read from `folder`, in fp32 when they are asked for.

    Raises:
        ValueError: one of another shape than the model's.
    """
    about = outlines(weights)
    for name, shape in shapes.items():
        if about[name].shape != shape:
            raise ValueError(
                f"Expected {name} of {folder} to be {list(shape)}, got {list(about[name].shape)}."
            )
    return Changed(weights, lambda _, tensor: tensor.float().contiguous())


def check_dtype(dtype: torch.dtype | str, what: str) -> torch.dtype:
    """It; raise ValueError if a weight, called `what`, is quantized or holds no real numbers."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"Expected {what} to be in fp32, bf16, fp16 or fp64, got {dtype}. Quantized weights "
            "are not read: take the model they were made of."
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def refuse_run(target: Path) -> None:
    """Raise ValueError if a folder holds checkpoints already, or a model of others, or would pass
    for a checkpoint.

    What is done with a folder of both is done with that model.
    """
    if has_name_of_a_checkpoint(target):
        raise ValueError(
            f"Expected the folder of a run, got {target}, the name of a checkpoint. Give another."
        )
    for holds, found in (
        ("a run", checkpoints(target)),
        ("a model of Hugging Face's", (target / "config.json").exists()),
    ):
        if found:
            raise ValueError(f"Expected a new folder, but {target} holds {holds}. Give another.")


def write_run(
    target: Path,
    config: TrainConfig,
    weights: Mapping[str, Tensor],
    *,
    run: Path | None = None,
    own: Sequence[Path] = (),
    say: Callable[[str], None],
) -> None:
    """Write weights by our names as the checkpoint of a run at iteration 0.

    Args:
        weights: each is asked for once, in their order, and let go when it is written.
        run: folder of the run that they are from, if any, with copies of its tokenizer.
        own: the tokenizer's files, where the new run is to name its copies and no longer these.

    Raises:
        ValueError: a tokenizer that the model's vocabulary has no room for; weights that are not
            numbers; a target that holds a run, or that another process is writing; what `weights`
            raise. Nothing is left then.
        OSError: files that cannot be read or written.
    """
    vocab_size, tokenizer = rows_of(weights), load_tokenizer(config, run)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"Expected a tokenizer of at most {vocab_size} tokens, the rows of the model's "
            f"vocabulary, got one of {tokenizer.vocab_size}. Give --tokenizer the model's own."
        )
    with unfilled():
        model = whole_model(config, vocab_size=vocab_size)
    assert weights.keys() == model.state_dict().keys()
    identity = config.model_identity(vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    copies = {path: target / TOKENIZER / path.name for path in own}
    named = {str(path): str(copy.absolute()) for path, copy in copies.items()}
    fields = {
        name: named.get(value, value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(config).items()
    }
    saved = SavedRun(
        format=FORMAT,
        iteration=0,
        consumed_samples=0,
        config=fields,
        identity=identity,
        data={},
        torch=torch.__version__,
        written=time.time(),
        state={},
    )
    from mb_train.checkpoint.weights import write_weights

    with locked(target):
        refuse_run(target)  # of another, meanwhile
        beside = (target / TOKENIZER).exists()
        try:
            # Before the checkpoint, with which the folder is a run's: one without its tokenizer
            # would pass for whole, and be in the way of another try.
            keep_tokenizer(config, target, run)
            for path, copy in copies.items():
                shutil.copyfile(path, copy)
            say(saving_line(0, target))
            write_weights(target, saved, model, Changed(weights, _checked))
            say(saved_line(0, target))
        except BaseException:
            if not beside:
                shutil.rmtree(target / TOKENIZER, ignore_errors=True)
            raise


def _checked(name: str, weight: Tensor) -> Tensor:
    if not all_finite([weight]):
        raise ValueError(f"Expected numbers in {name}, got NaN or infinity: the model is damaged.")
    return weight
