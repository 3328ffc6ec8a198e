"""The device of a run and the dtype that it computes with: as asked for, else as there is."""

from __future__ import annotations

import mb_kernels
import torch

from mb_train.config import TrainConfig
from mb_train.config.field import in_flags


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


def precision_note(config: TrainConfig, device: str) -> str | None:
    """What is said of a dtype that nobody asked for, where Megatron's scripts get another."""
    if device != "cuda" or config.fp16 or config.bf16 is not None:
        return None
    return (
        "bf16 on a GPU, having neither --bf16 nor --fp16; Megatron computes in fp32 then, as this "
        "run does with --no-bf16"
    )


def check_fp8(config: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for FP8 on a GPU that cannot multiply so, or in another dtype than bf16."""
    if config.fp8_format is None:
        return
    dtype = compute_dtype(config, device.type)
    if device.type == "cuda" and dtype is not torch.bfloat16:
        raise ValueError("Expected --bf16 with --fp8-format on a GPU, got --no-bf16.")
    nothing = torch.empty(0, 16, dtype=dtype, device=device)
    with in_flags({"fp8": "fp8_format"}):
        mb_kernels.float8_linear(nothing, nothing)  # no rows: it is asked whether it would
