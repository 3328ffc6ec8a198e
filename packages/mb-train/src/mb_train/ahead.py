"""The experts' kernels, compiled in threads while the rest of a run is set up.

Triton compiles a kernel at its first launch: with nothing in its cache the first step would wait
for some twenty of them in turn.
"""

from __future__ import annotations

from concurrent.futures import Future

import mb_kernels
import torch
from mb_parallel import ParallelMesh

from mb_train.config import TrainConfig, whole


def compile_ahead(
    config: TrainConfig, mesh: ParallelMesh, device: torch.device, compute_dtype: torch.dtype
) -> Future[int] | None:
    """Begin to compile what a layer of experts launches in training.

    Returns:
        The number of kernels to come. None where they are not known beforehand: without a GPU, for
        experts of other ranks, for those that do not run as one op.
    """
    one_op = config.moe_mlp_impl == "grouped" and config.moe_saved_activation_bits is None
    here = device.type == "cuda" and mesh.ep_size == 1
    if config.moe_num_experts is None or not (one_op and here):
        return None
    return mb_kernels.warm_up(
        tokens=whole(config.micro_batch_size) * whole(config.seq_length),
        hidden_size=_padded(whole(config.hidden_size)),
        ffn_hidden_size=_padded(config.expert_ffn_size),
        num_experts=config.moe_num_experts,
        top_k=config.moe_top_k,
        activation=config.activation_name,
        dtype=compute_dtype,
        logits_dtype=torch.float32 if config.moe_router_fp32 else compute_dtype,
        bias_dtype=torch.float32 if config.moe_mlp_bias else None,
        device=device,
    )


def outcome(compiling: Future[int]) -> str:
    """Wait for the kernels; a line about them. One that failed fails again where it is launched."""
    try:
        return f" kernels of the experts: {compiling.result()} compiled, or found in the cache"
    except Exception as error:
        return f" kernels of the experts: not compiled ahead, {type(error).__name__}: {error}"


def _padded(width: int) -> int:
    """As a layer pads it for the kernels."""
    return -(-width // 16) * 16
