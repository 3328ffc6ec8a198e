"""A norm over a width of which each rank has a part, such as one over the heads of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import adapt, shard, to_local
from mb_parallel.tensor_parallel.styles import Region, Style, own

# What a norm's attribute is called: by torch, and by transformers.
_EPSILONS = ("eps", "variance_epsilon")


@dataclass(frozen=True)
class SplitNorm(Style):
    """An RMS norm (arXiv 1910.07467) or layer norm (1607.06450) inside a region.

    Weight [W] and bias are split as the input [..., W / ranks] is. Ranks add up what the statistics
    are made of: one number for each token of an RMS norm, two for a layer norm. It is computed in
    fp32 at least, as torch's norms are.

    Args:
        rms: whether it is an RMS norm. Its module is like those of torch: with `weight`, which may
            be None, perhaps a `bias`, and `eps`, where None is the input's dtype's epsilon. It may
            be called `variance_epsilon`, as in transformers.
    """

    rms: bool

    def apply(self, module: nn.Module, region: Region) -> None:
        names = own(module, "weight", "bias")
        epsilon = next((name for name in _EPSILONS if hasattr(module, name)), None)
        if epsilon is None:
            raise ValueError(
                f"Expected a norm with {' or '.join(_EPSILONS)}, got {type(module).__name__} with "
                "neither. Give it one of them."
            )
        for name in names:
            shard(module, name, 0, region.mesh, what="width of a norm")
        normed = _rms_normed if self.rms else _layer_normed

        def forward(module: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
            eps = getattr(module, epsilon)
            eps = torch.finfo(x.dtype).eps if eps is None else eps
            y = normed(x.to(torch.promote_types(x.dtype, torch.float32)), eps, region.group)
            if module.weight is not None:
                y = y * module.weight.to(x.dtype)
            if getattr(module, "bias", None) is not None:
                y = y + module.bias.to(x.dtype)
            return y.to(x.dtype)

        how, views = (self, epsilon), dict.fromkeys(names, to_local)
        adapt(module, region.adapted, how, views=views, forward=forward)


def _rms_normed(x: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    return x * (_joint_mean(x.square(), group) + eps).rsqrt()


def _layer_normed(x: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    x = x - _joint_mean(x, group)
    return _rms_normed(x, eps, group)


def _joint_mean(x: Tensor, group: ProcessGroup) -> Tensor:
    """Mean over the last dimension of all ranks' parts."""
    total = collectives.reduce(x.sum(-1, keepdim=True), group)
    # Each rank goes on with the total for its own part, so the gradients are added up as well.
    return collectives.copy(total, group) / (x.shape[-1] * group.size())
