"""What is said of a run's sizes, by `mb-train plan` and by a run that will not fit."""

from __future__ import annotations

import torch
from mb_parallel.world import ranks_on_host

from mb_train.config import TrainConfig
from mb_train.machine.memory import host_memory
from mb_train.plan.devices import data_sheet, known_devices
from mb_train.plan.sizing import Sizes, sizes
from mb_train.plan.step_time import MEASURED
from mb_train.schedule import BatchSizes, train_iterations, train_samples
from mb_train.words import counted, figure

GIB = 2**30
# What takes less, for whoever has too little. More ranks alone share no gradients of a step with
# several micro-batches, nor copies of weights in 16 bits.
LESS_MEMORY = (
    "Lower --micro-batch-size, add --recompute-granularity full or, on a GPU, "
    "--optimizer-cpu-offload or --cpu-offloading-num-layers, or take more ranks, which share "
    "weights and gradients too with --zero-stage 3, and experts with --expert-model-parallel-size"
)


def describe(config: TrainConfig, found: Sizes, *, ranks: int, device: str) -> list[str]:
    """The sizes as lines."""
    batch, tokens = config.batch_size(config.data_parallel_size(ranks)), found.step_tokens
    lines = [
        f"parameters    {found.parameters:,} ({found.active:,} active)",
        f"memory        {_gib(found.memory)} GiB per rank: weights {_gib(found.weights)}, "
        f"gradients {_gib(found.gradients)}, optimizer {_gib(found.optimizer)}, "
        f"activations {_gib(found.activations)}",
        *_too_much(found.memory / GIB, device),
        *_of_the_host(found),
        f"checkpoint    {_gib(found.checkpoint)} GiB",
        f"step          {counted(tokens, 'token')}, {figure(found.step_flops / 1e12, 1)} TFLOP on "
        f"{counted(ranks, 'rank')}",
    ]
    if config.bf16 is False and not config.fp16:
        lines.append("time          not known in fp32: --bf16 or --fp16 have one")
    elif found.step_s is None:
        lines.append(
            f"time          not known on {device}; --gpu takes {', '.join(known_devices())}"
        )
    else:
        lines.append(
            f"time          {figure(1000 * found.step_s)} ms a step on {device}, "
            f"{tokens / found.step_s:,.0f} tokens/s, communication not counted"
        )
        if config.model not in MEASURED:
            lines.append(
                f"              of the GPU alone, and not fitted to measured steps of --model "
                f"{config.model}: without --cuda-graph the host may take longer"
            )
        if config.delta_sizes is not None:
            lines.append(
                "              of layers with a state by the kernels of mb-train[delta], and not "
                "fitted to measured steps; plain PyTorch takes longer, and keeps more"
            )
        if config.mamba_sizes is not None:
            lines.append(
                "              of Mamba layers by kernels, which are of bf16, heads and states of "
                "up to 128; plain PyTorch takes longer"
            )
        if config.fp8_format is not None:
            lines.append(
                "              of products in FP8 at twice the peak of bf16, and of rounding at "
                "the memory's speed"
            )
        steps = train_iterations(config, BatchSizes(config, batch))
        # Of a ramp-up the smaller steps take their share of a whole one.
        long = _duration(train_samples(config, batch) / batch * found.step_s)
        lines.append(f"training      {counted(steps, 'step')}, {long}")
    return lines


def _too_much(needed_gib: float, device: str) -> list[str]:
    """A line, if a device of this name is known to have less memory."""
    sheet = data_sheet(device)
    if sheet is None or needed_gib <= sheet.memory_gib:
        return []
    return [f"              warning: {device} has {sheet.memory_gib:.0f} GiB. {LESS_MEMORY}."]


def _of_the_host(found: Sizes) -> list[str]:
    """A line of what the host holds of the optimizer and of activations, if anything."""
    parts = {"optimizer": found.offloaded, "activations": found.kept_on_host}
    told = [f"{what} {_gib(nbytes)}" for what, nbytes in parts.items() if nbytes]
    if not told:
        return []
    # torch pins memory in sizes that are powers of two.
    return [
        f"host memory   {_gib(found.on_host)} GiB per rank, pinned: {', '.join(told)}; up to "
        "twice as much where tensors have other sizes than powers of two"
    ]


def _gib(nbytes: float) -> str:
    return figure(nbytes / GIB, 1)


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{figure(seconds)} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def memory_warning(
    config: TrainConfig, vocab_size: int, ranks: int, device: torch.device, name: str
) -> str | None:
    """A line to say at the start if the run will not fit into this rank's memory, else None."""
    found = sizes(config, vocab_size, ranks, name)
    host = host_memory() // max(ranks_on_host(), 1), "available memory"
    needs = [(found.memory, *host, LESS_MEMORY)]
    if device.type == "cuda":
        gpu = torch.cuda.mem_get_info(device)[0], "free GPU memory"
        lower = {
            "--optimizer-offload-fraction": found.offloaded,
            "--cpu-offloading-num-layers": config.cpu_offloading_num_layers,
            "--micro-batch-size": found.kept_on_host,
        }
        less = f"Lower {' or '.join(name for name, there in lower.items() if there)}, or take more"
        needs = [(found.memory, *gpu, LESS_MEMORY), (found.on_host, *host, f"{less} ranks")]
    for needed, there, what, remedy in needs:
        if needed > there:
            return (
                f" warning: this run needs about {needed / GIB:.1f} GiB per rank, and there are "
                f"{there / GIB:.1f} GiB of {what}. {remedy}; mb-train plan shows what takes how "
                "much."
            )
    return None
