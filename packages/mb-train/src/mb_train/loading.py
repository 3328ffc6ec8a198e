"""A trained model out of a run folder, for everything that does not train it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mb_layers import Experts
from torch import nn

from mb_train.checkpoint.read import load_checkpoint
from mb_train.config import TrainConfig
from mb_train.data.tokenizers import load_tokenizer
from mb_train.folder.run_folder import SavedRun, checkpoint_in, read_saved_run
from mb_train.machine.device import device_type
from mb_train.models.linear import Linear
from mb_train.models.mtp import names_of_modules
from mb_train.models.unfilled import unfilled
from mb_train.tasks import Task
from mb_train.tasks.make import one_process_task, whole_model

if TYPE_CHECKING:
    from mb_data import Tokenizer


@dataclass(frozen=True)
class Trained:
    """A model with its weights, in eval mode, and what it was trained as.

    left_out: of the checkpoint's tensors, beginnings of the names of those it does without.
    """

    model: Any
    config: TrainConfig
    saved: SavedRun
    checkpoint: Path
    left_out: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Rows of its vocabulary."""
        return self.saved.vocab_rows

    @property
    def task(self) -> Task:
        """What it was trained for, made anew as on one process; raises as `tokenizer`."""
        return one_process_task(self.config, self.tokenizer, vocab_size=self.vocab_size)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """That of the run, loaded when it is first asked for: to load GPT-2's takes 0.4 s.

        Raises:
            ValueError, OSError: its files are gone, damaged, or of another one.
        """
        tokenizer = load_tokenizer(self.config, self.checkpoint.parent)
        trained_on = self.saved.identity.get("tokenizer")
        if tokenizer.fingerprint != trained_on:
            raise ValueError(
                f"The model was trained on another tokenizer than {tokenizer.name} is now: its "
                f"fingerprint was {trained_on}, and is {tokenizer.fingerprint}."
            )
        return tokenizer


def load_trained(
    run: Path | str,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    kinds: Sequence[str] = ("gpt",),
    mtp_num_layers: int | None = 0,
    held_as_used: bool = False,
) -> Trained:
    """Load the model of a run folder or an iteration folder.

    One rank of several may do so without the others. Modules for further tokens, without which a
    model computes the same, stay where they are unless they are asked for.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        dtype: of the activations; None takes bf16 on a GPU and fp32 on a CPU. Weights are fp32.
        held_as_used: for passes alone, see `hold_as_used`; there never are more of them.
        kinds: of models that will do, by `--model`'s names.
        mtp_num_layers: how many of those modules to load; None: all that there are.

    Raises:
        ValueError: no checkpoint there, one that does not load, a model of another kind, or less
            modules than are asked for.
    """
    device = device_type(device)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    where = "meta" if held_as_used else device
    trained = outlined(run, where, dtype, kinds=kinds, mtp_num_layers=mtp_num_layers)
    if held_as_used:
        hold_as_used(trained.model, dtype)
        trained.model.to_empty(device=device)
    left_out = trained.left_out
    load_checkpoint(trained.checkpoint, trained.model, None, alone=True, left_out=left_out)
    return trained


def hold_as_used(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of maps and experts once and for all, instead of in every pass.

    The passes compute the same, also if weights are rounded as they are read. Of OLMoE four fifths
    of what an H200 did for a token went into these casts (benchmarks/results/2026-11-28-h200.md).
    In 16 bits the weights take half the memory.
    """
    for module in model.modules():
        if isinstance(module, Linear | Experts):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def outlined(
    run: Path | str,
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
    *,
    kinds: Sequence[str] = ("gpt",),
    mtp_num_layers: int | None = 0,
) -> Trained:
    """The same with weights that hold no numbers yet, or never on the meta device.

    Raises:
        ValueError: as `load_trained`, but for what a checkpoint's tensors are.
    """
    checkpoint = checkpoint_in(Path(run))
    saved = read_saved_run(checkpoint)
    config = TrainConfig(**saved.inherited())
    if config.model not in kinds:
        raise ValueError(
            f"Expected a model of kind {' or '.join(kinds)} in {run}, got {config.model}."
        )
    there = config.mtp_num_layers
    wanted = there if mtp_num_layers is None else mtp_num_layers
    if not 0 <= wanted <= there:
        raise ValueError(
            f"Expected --mtp-num-layers of 0 to {there}, the modules for further tokens of "
            f"{run}, got {wanted}."
        )
    config = replace(config, mtp_num_layers=wanted)
    left_out = names_of_modules(wanted, there)
    # Rounding to 8-bit floats is for training: products of few rows are slower for it, and some
    # GPUs cannot.
    plain = replace(config, fp8_format=None)
    with unfilled(device):
        model = whole_model(plain, vocab_size=saved.vocab_rows, compute_dtype=dtype)
    return Trained(model.eval(), config, saved, checkpoint, left_out)
