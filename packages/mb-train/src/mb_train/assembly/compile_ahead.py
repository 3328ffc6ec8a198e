"""Kernels that are compiled in threads while the rest of a run is set up.

Triton compiles a kernel at its first launch: with nothing in its cache the first step would wait
for some twenty of the experts in turn, and for six of head, gradients and optimizer.
"""

from __future__ import annotations

from concurrent.futures import Future

import mb_kernels
import mb_layers
import torch
from mb_parallel import ParallelMesh
from mb_parallel.optimizer import ShardedOptimizer, rehearse_accumulation, rehearse_step

from mb_train.assembly.assemble import Assembled
from mb_train.config import TrainConfig, whole
from mb_train.tasks.architecture import expert_config


def compile_experts(
    config: TrainConfig, mesh: ParallelMesh, device: torch.device, compute_dtype: torch.dtype
) -> Future[int] | None:
    """Begin to compile what a layer of experts launches in training.

    Returns:
        The number of kernels to come. None where there are none: without a GPU, without experts.
    """
    experts = expert_config(config)
    if experts is None or device.type != "cuda":
        return None
    tokens = whole(config.micro_batch_size) * whole(config.seq_length) // mesh.cp_size
    return mb_layers.warm_up(
        experts, tokens=tokens, dtype=compute_dtype, ranks=mesh.ep_size, device=device
    )


def compile_step(
    config: TrainConfig,
    mesh: ParallelMesh,
    model: Assembled,
    optimizer: ShardedOptimizer,
    device: torch.device,
    compute_dtype: torch.dtype,
    *,
    vocab_size: int,
    micro_batches: int,
) -> Future[int] | None:
    """Begin to compile what a step launches beside its layers: head, gradients, optimizer.

    Args:
        vocab_size: rows of the head, of all tensor-parallel ranks together.
        micro_batches: of a step. With one the experts' gradients stay in 16 bits.

    Returns:
        As `compile_experts`.
    """
    if device.type != "cuda":
        return None

    def rehearse() -> None:
        copies = model.working_copies
        if micro_batches == 1:
            rehearse_step(optimizer, {p: copy.dtype for p, copy in copies.items()})
        else:
            rehearse_accumulation(copies.values())
            rehearse_step(optimizer, {})
        if config.model != "ict":
            rows = vocab_size // mesh.tp_size
            start = mesh.tp_rank * rows if mesh.tp_size > 1 else None
            mb_kernels.rehearse_linear_cross_entropy(rows, compute_dtype, start=start)

    return mb_kernels.compile_ahead(rehearse, device=device)


def outcome(what: str, compiling: Future[int]) -> str:
    """Wait for the kernels; a line about them. One that failed fails again where it is launched."""
    try:
        return f" kernels of {what}: {compiling.result()} compiled, or found in the cache"
    except Exception as error:
        return f" kernels of {what}: not compiled ahead, {type(error).__name__}: {error}"
