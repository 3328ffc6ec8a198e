"""The device of a run and the dtype that it computes with: as asked for, else as there is."""

from __future__ import annotations

import torch

from mb_train.config import TrainConfig


def device_type(asked: str) -> str:
    """ "cuda" or "cpu", by `--device` and what there is.

    Raises:
        ValueError: `--device cuda` without a GPU.
    """
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ValueError("Expected a GPU for --device cuda, found none. See mb-train doctor.")
    if asked == "auto":
        return "cuda" if available else "cpu"
    return asked


def device_name(device: torch.device) -> str:
    """The GPU's name, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def compute_dtype(config: TrainConfig, device: str) -> torch.dtype:
    """The dtype of activations and products: what was asked for, else bf16 on "cuda"."""
    if config.fp16:
        return torch.float16
    bf16 = device == "cuda" if config.bf16 is None else config.bf16
    return torch.bfloat16 if bf16 else torch.float32
