"""Adafactor with the rate of a schedule: second moments of a matrix as a row and a column.

Shazeer and Stern (arXiv 1804.04235) in the form that fairseq and Megatron-LM train with: the
learning rate comes from outside, times the RMS of the parameter if `scale_parameter`; the decay of
the second moment is 1 - t^-0.8; no first moment. `torch.optim.Adafactor` bounds its rate by
1 / sqrt(t), always scales it, and reads flags on the host: its numbers are others.

Communication, for sharded parameters: the ranks that hold parts of a matrix add up its row and
column sums (rows + columns numbers for rows x columns parameters), two scalars per parameter and
one more per matrix. There are three rounds, each with one collective per process group.

Every number is scaled by its own gradients. So a number whose gradient is nothing but rounding
still makes steps of full size: the bias of attention's keys, which shifts all scores of a query
alike, is one. Its value differs from layout to layout, as it does from machine to machine, and
changes nothing of what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mb_parallel.arguments import above_0, is_pair
from mb_parallel.engines import is_dtensor
from mb_parallel.optimizer.sharded import ShardedOptimizer
from mb_parallel.shards import (
    all_reduce_together,
    local,
    local_grad,
    moved,
    shard_groups,
    spread,
    zeros_like,
)


class Adafactor(ShardedOptimizer):
    """Adafactor with an external learning rate, on plain and sharded fp32 parameters.

    Args:
        params: parameters or groups. Those of shape [..., rows, columns] are factored over the
            last two axes, vectors are not. An update is clipped by its RMS over the whole
            parameter.
        lr: set per step by the trainer.
        weight_decay: decoupled, times lr.
        eps: two numbers: one that is added to squared gradients, and the least RMS by which a
            parameter scales its rate.
        clip_threshold: the largest RMS of an update, before it is multiplied by the rate.
        decay_rate: the exponent of t in the decay of the second moment.
        scale_parameter: multiply the rate by the parameter's RMS.

    State: `step`; `exp_avg_sq_row` [..., rows] and `exp_avg_sq_col` [..., columns] of a matrix,
    `exp_avg_sq` of a vector; fp32.

    Raises:
        ValueError: a number below zero, one `eps`, or a parameter that is not fp32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        scale_parameter: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "scale_parameter": scale_parameter,
        }
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        above_0(clip_threshold=group["clip_threshold"])
        eps, decay_rate = group["eps"], group["decay_rate"]
        falls = isinstance(decay_rate, Real) and decay_rate <= 0
        if not (is_pair(eps) and eps[0] > 0 and eps[1] >= 0 and falls):
            raise ValueError(
                "Expected eps of two numbers, the first above 0, and a decay_rate of at most 0, "
                f"got eps={eps}, decay_rate={decay_rate}."
            )
        for parameter in group["params"]:
            if parameter.dtype is not torch.float32:
                raise ValueError(f"Expected parameters in fp32, got {parameter.dtype}.")

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        if parameter.ndim < 2:
            return {**state, "exp_avg_sq": zeros_like(parameter)}
        row, col = parameter.ndim - 2, parameter.ndim - 1
        return {
            **state,
            "exp_avg_sq_row": _zeros_without(parameter, col),
            "exp_avg_sq_col": _zeros_without(parameter, row),
        }

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        states = [self.state[p] for p in parameters]
        keep, (tiny, least_rms) = 1.0 - skip, group["eps"]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [keep] * len(steps))  # one tensor for all is read by the host
        t = torch.stack(steps).clamp(min=1.0)
        # A skipped step keeps all of what was there.
        fresh = t.double().pow(group["decay_rate"]).float() * keep
        grads = [torch.where(skip != 0, 0.0, local_grad(p).float() / divisor) for p in parameters]

        scaled = _precondition(parameters, states, grads, fresh.unbind(), tiny)
        # Before the first step moments are zero and have no root to divide by.
        scaled = [torch.where(skip != 0, 0.0, x) for x in scaled]
        weights = [local(p).detach() for p in parameters]
        sums = [x.square().sum() for x in (*scaled, *weights)]
        sums = all_reduce_together(sums, [shard_groups(p) for p in parameters] * 2)
        rms = [(s / p.numel()).sqrt() for s, p in zip(sums, [*parameters] * 2, strict=True)]
        for i, weight in enumerate(weights):
            lr = group["lr"] * keep
            if group["scale_parameter"]:
                lr = lr * rms[len(weights) + i].clamp(min=least_rms)
            clip = (rms[i] / group["clip_threshold"]).clamp(min=1.0)
            weight.mul_(1.0 - lr * group["weight_decay"]).sub_(scaled[i] * (lr / clip))


def _precondition(
    parameters: list[Tensor],
    states: list[dict[str, Tensor]],
    grads: list[Tensor],
    fresh: tuple[Tensor, ...],
    tiny: float,
) -> list[Tensor]:
    """Gradients over the root of their second moments, which take in what is `fresh` of them."""
    scaled = list(grads)
    matrices = [i for i, p in enumerate(parameters) if p.ndim >= 2]
    for i, state in enumerate(states):
        if "exp_avg_sq" in state:
            moment = local(state["exp_avg_sq"])
            moment.lerp_(grads[i].square() + tiny, fresh[i])
            scaled[i] = grads[i] * moment.rsqrt()
    parts: list[Tensor] = []
    groups: list[Any] = []
    for dim in (-1, -2):
        for i in matrices:
            parts.append((grads[i].square() + tiny).sum(dim))
            groups.append(shard_groups(parameters[i], [parameters[i].ndim + dim]))
    sums = all_reduce_together(parts, groups)
    rows, cols = [], []
    for place, i in enumerate(matrices):
        row, col = local(states[i]["exp_avg_sq_row"]), local(states[i]["exp_avg_sq_col"])
        row.lerp_(sums[place] / parameters[i].shape[-1], fresh[i])
        col.lerp_(sums[len(matrices) + place] / parameters[i].shape[-2], fresh[i])
        rows.append(row)
        cols.append(col)
    over_rows = [shard_groups(parameters[i], [parameters[i].ndim - 2]) for i in matrices]
    totals = all_reduce_together([row.sum(-1) for row in rows], over_rows)
    for i, row, col, total in zip(matrices, rows, cols, totals, strict=True):
        mean = (total / parameters[i].shape[-2])[..., None]
        scaled[i] = grads[i] * (row / mean).rsqrt()[..., None] * col.rsqrt()[..., None, :]
    return scaled


def _zeros_without(parameter: Tensor, dim: int) -> Tensor:
    """Zeros of `parameter`'s shape less axis `dim`, lying on the ranks as the parameter does."""
    shape = [size for axis, size in enumerate(parameter.shape) if axis != dim]
    if not is_dtensor(parameter):
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    from torch.distributed.tensor import Replicate

    placements = list(parameter.placements)
    for index, placement in enumerate(placements):
        sharded = getattr(placement, "dim", -1)
        if sharded >= dim:
            placements[index] = Replicate() if sharded == dim else moved(placement, -1)
    here = [size for axis, size in enumerate(local(parameter).shape) if axis != dim]
    zeros = torch.zeros(here, dtype=torch.float32, device=parameter.device)
    return spread(zeros, parameter.device_mesh, placements, shape)
