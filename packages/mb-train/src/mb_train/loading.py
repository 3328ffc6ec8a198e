"""A trained GPT out of a run folder, for everything that does not train it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mb_train.checkpoint import load_checkpoint
from mb_train.config import TrainConfig
from mb_train.models.gpt import GPT
from mb_train.run_folder import SavedRun, find_checkpoint, read_saved_run
from mb_train.tasks.architecture import transformer_config
from mb_train.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from mb_data import Tokenizer


@dataclass(frozen=True)
class Trained:
    """A model with its weights, in eval mode, and what it was trained as."""

    model: GPT
    config: TrainConfig
    saved: SavedRun
    checkpoint: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the run, loaded anew.

        Raises:
            ValueError, OSError: its files are gone or damaged.
        """
        return load_tokenizer(self.config)


def load_trained(run: Path, device: str = "cpu", dtype: torch.dtype | None = None) -> Trained:
    """Load the model of a run folder or an iteration folder.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        dtype: of the activations; None takes bf16 on a GPU and fp32 on a CPU. Weights are fp32.

    Raises:
        ValueError: no checkpoint there, one that does not load, or a model that is no GPT.
    """
    checkpoint = find_checkpoint(run)
    if checkpoint is None:
        raise ValueError(f"Expected a checkpoint in {run}, found none.")
    saved = read_saved_run(checkpoint)
    config = TrainConfig(**saved.inherited())
    if config.model != "gpt":
        raise ValueError(f"Expected a GPT in {run}, got a model of kind {config.model!r}.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("Expected a GPU for --device cuda, found none. See mb-train doctor.")
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = GPT(
            transformer_config(config, saved.identity["padded_vocab_size"]), compute_dtype=dtype
        )
    load_checkpoint(checkpoint, model, None)
    return Trained(model.eval(), config, saved, checkpoint)
