"""SGD with momentum over shards; torch's fused one has no way through DTensors (2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mb_parallel.arguments import at_least_0
from mb_parallel.optimizer.sharded import ShardedOptimizer
from mb_parallel.shards import local, local_grad, zeros_like


class SGD(ShardedOptimizer):
    """torch's SGD with `momentum` and coupled `weight_decay`, skipping steps on the device.

    State: `momentum_buffer`, in the parameter's dtype; none without momentum.

    Raises:
        ValueError: a rate outside its range.
    """

    _made_anew = ("momentum_buffer",)  # None or missing if it was saved without momentum
    _fixed = MappingProxyType({**ShardedOptimizer._fixed, "nesterov": False, "dampening": 0})

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        at_least_0(momentum=group["momentum"])

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        with_momentum = any(group["momentum"] for group in self.param_groups)
        return {"momentum_buffer": zeros_like(parameter)} if with_momentum else {}

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        keep = 1.0 - skip.double()  # weights may be in fp64
        for parameter in parameters:
            weight = local(parameter).detach()
            grad = torch.where(skip != 0, 0.0, local_grad(parameter) / divisor).to(weight.dtype)
            grad.add_(weight, alpha=group["weight_decay"])
            if group["momentum"]:
                buffer = local(self.state[parameter]["momentum_buffer"])
                new = buffer * group["momentum"] + grad
                grad = buffer.lerp_(new, keep.to(buffer.dtype))
            weight.sub_(grad * (group["lr"] * keep))
