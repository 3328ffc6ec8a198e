"""Data parallelism with sharded parameters, gradients and optimizer state, over torch's FSDP2.

`fully_shard` is applied block by block, from the inside out: each block gathers its weights just
before it runs and reduces its gradients just after, while its neighbours compute. Weights are kept
in their own dtype (fp32: the master weights), computed with in `compute_dtype`, and gradients are
summed in fp32. The ZeRO stages (Rajbhandari et al., arXiv 1910.02054) map onto it: stage 3 frees a
block's weights after its forward, stage 2 keeps them for the backward.

Applied from outside, the model's own code knows nothing of it. A mesh of one process changes
nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def apply_data_parallel(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    blocks: Iterable[nn.Module],
    compute_dtype: torch.dtype = torch.float32,
    keep_fp32: Iterable[nn.Module] = (),
    zero_stage: int = 3,
) -> None:
    """Shard `model` in place over `mesh`; its parameters become DTensors.

    Args:
        model: parameters on the mesh's device, equal on every rank (same seed), fp32 for training.
        mesh: one-dimensional; its ranks see different samples. None or one rank: nothing is done,
            and `compute_dtype` is the model's own business (autocast, or weights cast on use).
        blocks: submodules that are gathered and reduced one at a time, in the order they run.
        compute_dtype: dtype of the gathered weights and of the blocks' floating-point inputs.
        keep_fp32: submodules that see their own weights and inputs uncast, such as the routers of
            an MoE, whose choices rounding would change. Each is a unit of its own.
        zero_stage: 3 frees weights between forward and backward (least memory), 2 keeps them (one
            gather less per step).

    Raises:
        ValueError: a mesh with more than one axis, or another `zero_stage`.
    """
    if zero_stage not in (2, 3):
        raise ValueError(f"Expected zero_stage 2 or 3, got {zero_stage}.")
    if mesh is None or mesh.size() == 1:
        return
    if mesh.ndim != 1:
        raise ValueError(
            f"Expected a mesh with one axis, got {mesh.ndim} axes {mesh.mesh_dim_names}. "
            'Pass the data-parallel axis alone: mesh["dp"].'
        )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = zero_stage == 3
    if compute_dtype != torch.float32:
        for module in keep_fp32:
            fully_shard(module, mesh=mesh, mp_policy=uncast, reshard_after_forward=reshard)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # What no block owns (embeddings, final norm, head) is needed at both ends of the step: keep it.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Reduce gradients at the end of the next backward, or keep adding locally (accumulation).

    Call with False before every micro-batch of a step but the last. Nothing happens to a model that
    `apply_data_parallel` left alone.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their joint L2 norm is at most `max_norm`.

    The norm is taken over all shards. Nothing is read back to the host.

    Args:
        parameters: with gradients, plain or sharded by FSDP2; those without one are skipped.
        max_norm: 0 leaves gradients as they are.

    Returns:
        The norm before clipping, fp32 scalar on the device; zero if there is no gradient.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = nn.utils.get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = norm.float()
    if max_norm > 0:
        # Megatron's rule: factor max_norm / (norm + 1e-6), never above 1.
        factor = (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        torch._foreach_mul_(local, factor)
    return norm
