"""One gradient norm over dense, tensor-parallel and expert meshes and pipeline stages; the step.

Each rank adds up the squares of its shards. These sums are added over the axes of a parameter's
mesh that shard it, and not over those that replicate it. So a replicated parameter counts once, and
an expert counts wherever it is. Parameters that are sharded alike share a collective. Then the
stages' sums are added, and all ranks take the same result, bit for bit, so that replicas cannot
take different steps. Nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import mb_kernels
import torch
import torch.distributed as dist
from mb_kernels.uncompiled import uncompiled_step
from torch import Tensor

from mb_parallel.arguments import at_least_0, several_optimizers, tensors
from mb_parallel.gradient_sync import refuse_apart, refuse_replaced
from mb_parallel.mesh import ParallelMesh, check_mesh
from mb_parallel.optimizer.alike import check_alike
from mb_parallel.optimizer.scaler import GradScaler
from mb_parallel.shards import (
    all_reduce_together,
    local,
    local_grad,
    one_for_same_ranks,
    shard_groups,
)


class StepResult(NamedTuple):
    """What `clip_and_step` did, fp32 scalars on the device.

    grad_norm: before clipping, without the loss scale; infinite if any gradient was not finite.
    skipped: 1 if the step was skipped for that reason, else 0.
    """

    grad_norm: Tensor
    skipped: Tensor


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    *,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """The L2 norm of the gradients of the whole model; every rank calls it and gets the same.

    Args:
        parameters: of this rank's stage, plain or DTensors over whatever meshes. One without a
            gradient counts as zero.
        mesh: None for a model that is no pipeline.
        uncounted: parameters that another stage counts, such as the head's copy of a tied
            embedding.

    Returns:
        fp32 scalar on the device; infinite if a gradient anywhere is NaN or infinite.
    """
    parameters = tensors(parameters)
    refuse_apart(parameters)
    return _joint_norm(_grads(parameters), mesh, uncounted)


@torch.no_grad()
def weight_norm(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    *,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """The L2 norm of the parameters themselves, frozen ones too; else as `grad_norm`."""
    weights = {parameter: local(parameter).detach() for parameter in tensors(parameters)}
    return _joint_norm(weights, mesh, uncounted)


@torch.no_grad()
def zeros_in_grad(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    *,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """How many numbers of the whole model's gradients are zero, each counted once.

    A few are zero by chance, because a sum cancels in one order and not in another (up to five were
    seen in fp16). So layouts, and sizes of micro-batches, differ by as many.

    Args:
        parameters, mesh, uncounted: as for `grad_norm`. One without a gradient has no zeros.

    Returns:
        fp64 scalar on the device, equal on all ranks.
    """
    parameters = tensors(parameters)
    refuse_apart(parameters)
    return _joint_sum(_grads(parameters), _count_zeros, mesh, uncounted)


def _grads(parameters: Iterable[Tensor]) -> dict[Tensor, Tensor | None]:
    return {p: None if p.grad is None else local_grad(p) for p in parameters}


def _joint_norm(
    shards: Mapping[Tensor, Tensor | None], mesh: ParallelMesh | None, uncounted: Iterable[Tensor]
) -> Tensor:
    """The norm of all ranks' shards, which are given as to `_joint_sum`."""
    total = _joint_sum(shards, _sum_of_squares, mesh, uncounted)
    # A maximum is not bound to keep NaN; an infinity it keeps.
    total = torch.nan_to_num(total, nan=torch.inf, posinf=torch.inf)
    if mesh is not None and mesh.dense is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total.sqrt()


def _joint_sum(
    shards: Mapping[Tensor, Tensor | None],
    measure: Callable[[list[Tensor], torch.device], Tensor],
    mesh: ParallelMesh | None,
    uncounted: Iterable[Tensor],
) -> Tensor:
    """What `measure` finds in the shards, summed over the ranks of all stages.

    Args:
        shards: by their parameters, which say over which ranks to add up; None counts as nothing.
            The ranks of a stage pass the same parameters, whatever a rank has of their shards.
    """
    if mesh is not None:
        check_mesh(mesh)
    left_out = {id(p) for p in tensors(uncounted)}
    device = next(iter(shards)).device if shards else _device(mesh)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    groups = one_for_same_ranks(map(shard_groups, shards))
    for (parameter, shard), lying in zip(shards.items(), groups, strict=True):
        alike = by_groups.setdefault(lying, [])
        if shard is not None and id(parameter) not in left_out:
            alike.append(shard)
    parts = [measure(found, device) for found in by_groups.values()]
    summed = all_reduce_together(parts, list(by_groups))
    total = torch.stack(summed).sum() if summed else measure([], device)
    return total if mesh is None else mesh.all_reduce(total, "pp")


def _device(mesh: ParallelMesh | None) -> torch.device:
    """Where the other ranks' parameters are, of a rank without any: sums meet there."""
    return torch.device("cpu" if mesh is None or mesh.dense is None else mesh.dense.device_type)


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    mesh: ParallelMesh | None = None,
    *,
    uncounted: Iterable[Tensor] = (),
) -> Tensor:
    """Scale gradients in place so that their joint L2 norm is at most `max_norm`.

    For optimizers that cannot do it in their step (see `clip_and_step`): this reads and writes all
    gradients once more.

    Args:
        parameters, mesh, uncounted: as for `grad_norm`.
        max_norm: 0 leaves gradients as they are.

    Returns:
        The norm before clipping, fp32 scalar on the device.

    Raises:
        ValueError: `max_norm` is below 0 or no number.
    """
    at_least_0(max_norm=max_norm)
    parameters = tensors(parameters)
    norm = grad_norm(parameters, mesh, uncounted=uncounted)
    grads = [local_grad(p) for p in parameters if p.grad is not None]
    if max_norm > 0 and grads:
        with torch.no_grad():
            torch._foreach_mul_(grads, _divisor(norm, max_norm).reciprocal())
    return norm


@uncompiled_step
@torch.no_grad()
def clip_and_step(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    max_norm: float = 0.0,
    mesh: ParallelMesh | None = None,
    scaler: GradScaler | None = None,
    uncounted: Iterable[Tensor] = (),
) -> StepResult:
    """Clip and update: one pass over the gradients for the norm, and one for the step.

    If a gradient of any rank is not finite, nothing changes on any rank: no parameter, no moment,
    no step count. The gradients themselves stay as they are, except with torch's fused optimizers,
    which write them back clipped and without the scale.

    Every rank calls this. What one alone refuses the others do not hear of, for which they would
    have to wait for each other in every step: they wait for it, until the process group's timeout.
    At the first step of an optimizer they do, and compare what they step with.

    Args:
        optimizer: of this package, or torch's with `fused=True`; one, or several that share the
            norm and skip together; none of a pipeline's stage in which nothing trains.
        max_norm: of the whole model's gradients; 0 does not clip.
        mesh, uncounted: as for `grad_norm`.
        scaler: the loss was multiplied by its scale. It is told whether the step overflowed.

    Raises:
        ValueError: no optimizer, or one that cannot skip a step on the device; a parameter of two,
            or one that was replaced; parameters of which none has a gradient; another scaler;
            `max_norm` is below 0 or no number; rates, `max_norm` or scales that differ between the
            ranks of a stage at an optimizer's first step.
    """
    at_least_0(max_norm=max_norm)
    if not isinstance(scaler, GradScaler | None):
        raise ValueError(
            f"Expected scaler to be a mb_parallel.optimizer.GradScaler, got one of "
            f"{type(scaler).__module__}.{type(scaler).__name__}."
        )
    optimizers = several_optimizers(optimizer)
    if not optimizers and (mesh is None or mesh.pp_size == 1):
        raise ValueError("Expected an optimizer, got none, where no other stage can have one.")
    for one in optimizers:
        if not getattr(one, "_step_supports_amp_scaling", False):
            raise ValueError(
                "Expected an optimizer of mb_parallel.optimizer or one of torch's with fused=True, "
                f"got {type(one).__name__}, which cannot skip a step on the device."
            )
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if len(set(parameters)) < len(parameters):
        raise ValueError(
            "Expected each parameter in one optimizer, got some in two, which would step twice. "
            "Give each optimizer parameters of its own."
        )
    refuse_replaced(parameters)
    refuse_apart(parameters)
    trained = [p for p in parameters if p.requires_grad]
    if trained and all(p.grad is None for p in trained):
        raise ValueError(
            "Expected gradients, got none in any parameter of the optimizer. Call backward before, "
            "and make the optimizer after what replaces parameters (swap_blocks, load_state_dict "
            "with assign=True)."
        )
    check_alike(optimizers, mesh, max_norm=max_norm, scaler=scaler)
    norm = _joint_norm(_grads(parameters), mesh, uncounted)
    scale = None if scaler is None else scaler.scale_on(norm.device)
    if scale is not None:
        norm = norm / scale
    skipped = 1.0 - norm.isfinite().float()
    divisor = _divisor(norm, max_norm)
    # torch's own protocol between its scaler and its fused optimizers, which ours follow.
    given = {"grad_scale": divisor if scale is None else divisor * scale, "found_inf": skipped}
    for one in optimizers:
        for name, value in given.items():
            setattr(one, name, value)
        try:
            one.step()
        finally:
            for name in given:
                delattr(one, name)
    if scaler is not None:
        scaler.update(skipped)
    return StepResult(norm, skipped)


def _divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Megatron's rule, gradient times max_norm / (norm + 1e-6) unless that is above 1, inverted."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return ((norm + 1.0e-6) / max_norm).clamp(min=1.0)


def _sum_of_squares(shards: list[Tensor], device: torch.device) -> Tensor:
    if not shards:
        return torch.zeros((), dtype=torch.float32, device=device)
    return mb_kernels.sum_of_squares(shards)


def _count_zeros(grads: list[Tensor], device: torch.device) -> Tensor:
    """fp64 scalar, exact for any number of parameters."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        total += grad.numel() - grad.count_nonzero()
    return total
