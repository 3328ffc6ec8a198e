"""AdamW in one pass over fp32 master weights.

A parameter in fp32 is its own master weight. For one in bf16 or fp16 the state holds an fp32
master, and the parameter is the copy to compute with, because a 16-bit weight that is updated in
place loses every update below its last bit. If something else writes the parameter later
(`load_state_dict`, or your own code), the master takes its values wherever they are not the
master's, rounded. Such writes are noticed by autograd's count of them. What is written into
`parameter.data`, or by a collective (`dist.broadcast`), is not counted, and the next step undoes
it: call `torch.autograd.graph.increment_version(parameters)` after it. Nor is what
`torch.distributed.checkpoint` writes into the DTensors of a model's state dict: if you load the
model that way without the optimizer's state, pass the state dict to the model's `load_state_dict`
afterwards. The arithmetic and the kernel are `mb_kernels.adamw_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import mb_kernels
import torch
from torch import Tensor

from mb_parallel.arguments import above_0, is_pair
from mb_parallel.optimizer.sharded import ShardedOptimizer
from mb_parallel.optimizer.unwritten import Unwritten
from mb_parallel.optimizer.working_copies import HALVES, WorkingCopies
from mb_parallel.shards import local, local_grad, on_meta, zeros_like

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(ShardedOptimizer):
    """AdamW with torch's numbers (to 1e-6), fp32 masters and moments, and one pass a step.

    Args:
        params: parameters or groups, plain or DTensors over any meshes, in fp32, bf16 or fp16.
        lr, betas, eps, weight_decay: as torch's; `lr` and `weight_decay` of a group may be set
            before any step.
        state_dtype: of both moments. bf16 halves their bytes and rounds stochastically.
        working_copies: 16-bit copies of fp32 parameters, written in the same pass.
        offload_fraction: share of the moments that lies in pinned memory of the host, from 0 to 1:
            those of as many parameters, in their order, as do not exceed it. The kernel reads and
            writes them there, so a step takes as long as they take over the link, and the host
            waits for its end. CPU tensors stay where they are.
        group_defaults: for subclasses: what their groups hold besides, and its defaults.

    State: `exp_avg`, `exp_avg_sq`, `step`, torch's names; `master` for 16-bit parameters.

    Raises:
        ValueError: a rate outside its range, or a dtype other than these.
    """

    _made_anew = ("master",)  # which torch's AdamW has not
    # The last tells torch's AdamW from its Adam, whose state has the same names.
    _fixed = MappingProxyType(
        {**ShardedOptimizer._fixed, "amsgrad": False, "decoupled_weight_decay": True}
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype = torch.float32,
        working_copies: WorkingCopies | None = None,
        offload_fraction: float = 0.0,
        group_defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"Expected state_dtype torch.float32 or bfloat16, got {state_dtype}.")
        if not isinstance(working_copies, WorkingCopies | None):
            raise ValueError(
                "Expected working_copies to be what hold_working_copies returned, got "
                f"{type(working_copies).__name__}."
            )
        if not (isinstance(offload_fraction, Real) and 0 <= offload_fraction <= 1):
            raise ValueError(
                "Expected a share of the moments from 0 to 1, got "
                f"offload_fraction={offload_fraction!r}."
            )
        self.state_dtype = state_dtype
        self.offload_fraction = offload_fraction
        self._offloaded: set[Tensor] = set()
        self._numbers = self._numbers_offloaded = 0
        self._copies = working_copies if working_copies is not None else WorkingCopies({})
        self._equal = Unwritten()  # 16-bit parameters, to their masters
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**rates, **group_defaults})

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        eps, betas = group["eps"], group["betas"]
        above_0(eps=eps)
        if not (is_pair(betas) and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"Expected two betas from 0 up to but not 1, got betas={betas}.")
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, *HALVES):
                raise ValueError(
                    f"Expected parameters in fp32, bf16 or fp16, got {parameter.dtype}."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            numbers = local(parameter).numel()
            self._numbers += numbers
            if 0 < self._numbers_offloaded + numbers <= self.offload_fraction * self._numbers:
                self._numbers_offloaded += numbers
                self._offloaded.add(parameter)

    def on_host(self, parameter: Tensor, key: str) -> bool:
        return key in _MOMENTS and parameter in self._offloaded

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for key in _MOMENTS:
            on_host = self.on_host(parameter, key)
            state[key] = zeros_like(parameter, self.state_dtype, on_host=on_host)
        if parameter.dtype in HALVES:
            state["master"] = parameter.detach().float()
            if not parameter.is_meta:  # which only plans it
                self._equal.note([parameter])
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `ShardedOptimizer`'s. Where a weight is not its master rounded, the weight counts."""
        super().load_state_dict(state_dict)
        self._equal.clear()

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        weights, grads, copies = [], [], []
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "master" in state and parameter not in self._equal:
                _follow(local(state["master"]), local(parameter).detach())
            copy = parameter if "master" in state else self._copies.get(parameter)
            weights.append(local(state.get("master", parameter)).detach())
            copies.append(None if copy is None else local(copy).detach())
            grads.append(local_grad(parameter))
        _step(group, weights, grads, copies, states, divisor, skip)
        self._copies.written(parameters)
        self._equal.note(p for p in parameters if p.dtype in HALVES)

    def rehearse(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        weights, copies = [], []
        states = [self.planned_state(parameter) for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            copy = parameter if "master" in state else self._copies.get(parameter)
            weights.append(state.get("master", on_meta(parameter)))
            copies.append(None if copy is None else on_meta(copy))
        scalar = torch.empty((), device="meta")
        _step(group, weights, grads, copies, states, scalar, scalar)


def _step(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    copies: list[Tensor | None],
    states: list[dict[str, Tensor]],
    divisor: Tensor,
    skip: Tensor,
) -> None:
    beta1, beta2 = group["betas"]
    mb_kernels.adamw_step(
        weights,
        grads,
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        copies,
        [state["step"] for state in states],
        lr=float(group["lr"]),  # a kernel would take a tensor for where its number lies
        betas=(float(beta1), float(beta2)),
        eps=group["eps"],
        weight_decay=float(group["weight_decay"]),
        grad_scale=divisor,
        found_inf=skip,
    )


def _follow(master: Tensor, weight: Tensor) -> None:
    """Write `weight` into `master` wherever it is not the master's value, rounded."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))
