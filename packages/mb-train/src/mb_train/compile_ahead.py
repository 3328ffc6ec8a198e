"""The experts' kernels, compiled in threads while the rest of a run is set up.

Triton compiles a kernel at its first launch: with nothing in its cache the first step would wait
for some twenty of them in turn.
"""

from __future__ import annotations

from concurrent.futures import Future

import mb_layers
import torch
from mb_parallel import ParallelMesh

from mb_train.config import TrainConfig, whole
from mb_train.tasks.architecture import expert_config


def compile_ahead(
    config: TrainConfig, mesh: ParallelMesh, device: torch.device, compute_dtype: torch.dtype
) -> Future[int] | None:
    """Begin to compile what a layer of experts launches in training.

    Returns:
        The number of kernels to come. None where there are none: without a GPU, without experts.
    """
    experts = expert_config(config)
    if experts is None or device.type != "cuda":
        return None
    tokens = whole(config.micro_batch_size) * whole(config.seq_length)
    return mb_layers.warm_up(
        experts, tokens=tokens, dtype=compute_dtype, ranks=mesh.ep_size, device=device
    )


def outcome(compiling: Future[int]) -> str:
    """Wait for the kernels; a line about them. One that failed fails again where it is launched."""
    try:
        return f" kernels of the experts: {compiling.result()} compiled, or found in the cache"
    except Exception as error:
        return f" kernels of the experts: not compiled ahead, {type(error).__name__}: {error}"
