"""Megatron-LM's lines, to the blank, so that its parsers read them; text alone, nothing is printed.

What Megatron has no field for is on a line of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

from mb_train.config import TrainConfig


def world_line(ranks: int, *, data: int, tensor: int, pipeline: int, context: int = 1) -> str:
    """How many ranks there are, and how they are divided.

    Of context parallelism, which Megatron-LM did not have, only where there is some.
    """
    shared = f"context-parallel-size: {context}, " if context > 1 else ""
    return (
        f"using world size: {ranks}, data-parallel-size: {data}, {shared}"
        f"tensor-model-parallel size: {tensor}, pipeline-model-parallel size: {pipeline} "
    )


def argument_lines(config: TrainConfig) -> str:
    """Every field of a run, sorted, its name padded with dots to 48 columns."""
    items = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in asdict(config).items()]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *sorted(items, key=str.lower),
            "-------------------- end of arguments ---------------------",
        ]
    )


def vocabulary_line(size: int, padded: int) -> str:
    """By how much the vocabulary was padded."""
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parameters_line(count: int, *, tensor_rank: int, pipeline_rank: int) -> str:
    """Parameters of a model-parallel rank."""
    place = f"({tensor_rank}, {pipeline_rank})"
    return f" > number of parameters on (tensor, pipeline) model parallel rank {place}: {count}"


def datetime_line(what: str) -> str:
    """When something happened."""
    return f"[{what}] datetime: {time.strftime('%Y-%m-%d %H:%M:%S')} "


def saving_line(iteration: int, folder: object) -> str:
    """That a checkpoint is begun."""
    return f"saving checkpoint at iteration {iteration:7d} to {folder}"


def saved_line(iteration: int, folder: object) -> str:
    """That a checkpoint is whole."""
    return f"  successfully saved checkpoint at iteration {iteration:7d} to {folder}"


def loaded_line(iteration: int, folder: object) -> str:
    """That a checkpoint was taken."""
    return f"  successfully loaded checkpoint from {folder} at iteration {iteration}"


def train_line(
    iteration: int,
    iterations: int,
    *,
    consumed_samples: int,
    elapsed_ms: float,
    lr: float,
    batch_size: int,
    losses: Mapping[str, float],
    grad_norm: float,
    loss_scale: float = 1.0,
    zeros_in_grad: float | None = None,
    params_norm: float | None = None,
    skipped_iterations: int = 0,
    nan_iterations: int = 0,
    tflops: float | None = None,
) -> str:
    """The progress line, as there: `lr` is that of the next step, losses of 0 are left out.

    Args:
        tflops: model TFLOP/s of a GPU, where they are asked for and known.
    """
    fields = [
        f" iteration {iteration:8d}/{iterations:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
    ]
    if tflops is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}")
    fields += [f"learning rate: {lr:.3E}", f"global batch size: {batch_size:5d}"]
    fields += [f"{name}: {value:.6E}" for name, value in losses.items() if value > 0.0]
    fields += [f"loss scale: {loss_scale:.1f}", f"grad norm: {grad_norm:.3f}"]
    if zeros_in_grad is not None:
        fields.append(f"num zeros: {zeros_in_grad:.1f}")
    if params_norm is not None:
        fields.append(f"params norm: {params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {skipped_iterations:3d}",
        f"number of nan iterations: {nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


def validation_lines(place: str, losses: Mapping[str, float]) -> str:
    """The validation line between two rules; `place` is "iteration 100", say."""
    line = f" validation loss at {place} | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def measured_line(place: str, values: Mapping[str, float]) -> str:
    """What a task tells of its model beside its losses (ours)."""
    return f" measured at {place} | " + "".join(f"{k}: {v:.4g} | " for k, v in values.items())


def perplexity(loss: float) -> float:
    """exp of a loss in nats, capped as in Megatron; NaN of NaN, for which the order matters."""
    return math.exp(min(loss, 20.0))
