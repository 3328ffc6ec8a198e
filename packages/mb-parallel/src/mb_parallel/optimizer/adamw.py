"""AdamW in one pass over fp32 master weights, and what all optimizers of this package share.

A parameter in fp32 is its own master weight. For one in bf16 or fp16 the state holds an fp32
master, and the parameter is the copy to compute with, because a 16-bit weight that is updated in
place loses every update below its last bit. If something else writes the parameter later
(`load_state_dict`, or your own code), the master takes its values wherever they are not the
master's, rounded. Such writes are noticed by autograd's count of them. What
`torch.distributed.checkpoint` writes into the DTensors of a model's state dict is not counted: if
you load the model that way without the optimizer's state, pass the state dict to the model's
`load_state_dict` afterwards. The arithmetic and the kernel are `mb_kernels.adamw_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import mb_kernels
import torch
from torch import Tensor

from mb_parallel.arguments import above_0, at_least_0, is_pair
from mb_parallel.gradient_sync import drop_apart, has_grad
from mb_parallel.optimizer.working_copies import WorkingCopies
from mb_parallel.shards import Unwritten, local, local_grad, zeros_like

_HALVES = (torch.bfloat16, torch.float16)
# Without torch's decorator, which imports the compiler only to tell it to keep out.
_add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class ShardedOptimizer(torch.optim.Optimizer):
    """Keeps state in shards, in dtypes of its own, and can skip a step on the device.

    A parameter's state is what `make_state` returns. Its DTensors are sharded like the parameter,
    so that `torch.distributed.checkpoint` reshards them by name.
    """

    # What torch's GradScaler and ours look for: `grad_scale` and `found_inf` are obeyed.
    _step_supports_amp_scaling = True

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state of a parameter."""
        raise NotImplementedError

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        """Step `parameters`, which are on one device and have a gradient, with `group`'s rates.

        divisor, skip: fp32 scalars on the device. Gradients are divided by the first; nothing is
            changed if the second is 1.
        """
        raise NotImplementedError

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a group with parameters or rates that cannot be trained with."""
        at_least_0(lr=group["lr"], weight_decay=group["weight_decay"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before any step; a group that is refused is not added.

        Raises:
            ValueError: as the constructor's.
        """
        _add_param_group(self, param_group)
        try:
            self.check(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; of a step that is given up, what ranks have not added up goes too."""
        _zero_grad(self, set_to_none)
        drop_apart(p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient, and their state, stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if not has_grad(parameter):
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.make_state(parameter)
                by_device.setdefault(parameter.device, []).append(parameter)
            for device, parameters in by_device.items():
                divisor = self._flag("grad_scale", 1.0, device)
                self.update(group, parameters, divisor, self._flag("found_inf", 0.0, device))
        return loss

    def _flag(self, name: str, default: float, device: torch.device) -> Tensor:
        value = getattr(self, name, None)
        if value is None:
            return torch.full((), default, dtype=torch.float32, device=device)
        return value.to(device, torch.float32).reshape(())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, except that state keeps its dtypes; torch casts it to the parameter's.

        Entries that a group lacks stay as they are: torch's flat state dicts leave out empty ones.

        Raises:
            ValueError: groups of other parameters or rates that cannot be trained with; state of
                another kind of optimizer or of other sizes, as of whole parameters where they are
                sharded. Nothing is loaded then.
        """
        given = state_dict["param_groups"]
        saved = [id_ for group in given for id_ in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        if [len(g["params"]) for g in given] == [len(g["params"]) for g in self.param_groups]:
            given = [{**now, **group} for now, group in zip(self.param_groups, given, strict=True)]
            for now, group in zip(self.param_groups, given, strict=True):
                self.check({**group, "params": now["params"]})
        planned = {id_: self.planned_state(p) for id_, p in zip(saved, mine, strict=False)}
        for id_, values in state_dict["state"].items():
            self._check_state(planned.get(id_, {}), values)
        super().load_state_dict({**state_dict, "param_groups": given})
        for id_, parameter in zip(saved, mine, strict=True):
            values = state_dict["state"].get(id_)
            if values:
                dtypes = {k: v.dtype for k, v in planned[id_].items()}
                state = {
                    key: value.to(parameter.device, dtypes.get(key, value.dtype))
                    if isinstance(value, Tensor)
                    else value
                    for key, value in values.items()
                }
                if any(state.get(key) is None for key in dtypes):
                    fresh = self.make_state(parameter)
                    state |= {k: v for k, v in fresh.items() if state.get(k) is None}
                self.state[parameter] = state

    # What saved state may lack: it begins as if fresh.
    _made_anew: tuple[str, ...] = ()

    def _check_state(self, planned: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Refuse a parameter's state that lacks something, or has it in other sizes."""
        for key, plan in planned.items():
            value = values.get(key)
            if values and value is None and key not in self._made_anew:
                raise ValueError(
                    f"Expected state of {type(self).__name__}, {', '.join(planned)}, got "
                    f"{', '.join(values)}. Load what an optimizer of this kind saved."
                )
            size = tuple(local(value).shape) if isinstance(value, Tensor) else ()
            if value is not None and size != plan.shape:
                raise ValueError(
                    f"Expected {key} of {tuple(plan.shape)}, this rank's part, got {size}. Load "
                    "state that was saved in another layout by set_optimizer_state_dict or load of "
                    "torch.distributed.checkpoint."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks and a replaced `step`; torch's omits what subclasses add."""
        mine = vars(self).items()
        return {key: value for key, value in mine if key != "step" and not key.endswith("_hooks")}

    def planned_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Meta tensors of the sizes and dtypes of `make_state` on this rank, nothing allocated."""
        return self.make_state(torch.empty_like(local(parameter).detach(), device="meta"))


class AdamW(ShardedOptimizer):
    """AdamW with torch's numbers (to 1e-6), fp32 masters and moments, and one pass a step.

    Args:
        params: parameters or groups, plain or DTensors over any meshes, in fp32, bf16 or fp16.
        lr, betas, eps, weight_decay: as torch's; `lr` and `weight_decay` of a group may be set
            before any step.
        state_dtype: of both moments. bf16 halves their bytes and rounds stochastically.
        working_copies: 16-bit copies of fp32 parameters, written in the same pass.

    State: `exp_avg`, `exp_avg_sq`, `step`, torch's names; `master` for 16-bit parameters.

    Raises:
        ValueError: a rate outside its range, or a dtype other than these.
    """

    _made_anew = ("master",)  # which torch's AdamW has not
    # Defaults of what groups of a subclass hold besides.
    _more_of_groups: Mapping[str, Any] = MappingProxyType({})

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
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"Expected state_dtype torch.float32 or bfloat16, got {state_dtype}.")
        if not isinstance(working_copies, WorkingCopies | None):
            raise ValueError(
                "Expected working_copies to be what hold_working_copies returned, got "
                f"{type(working_copies).__name__}."
            )
        self.state_dtype = state_dtype
        self._copies = working_copies if working_copies is not None else WorkingCopies({})
        self._equal = Unwritten()  # 16-bit parameters, to their masters
        rates = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**rates, **self._more_of_groups})

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        eps, betas = group["eps"], group["betas"]
        above_0(eps=eps)
        if not (is_pair(betas) and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"Expected two betas from 0 up to but not 1, got betas={betas}.")
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, *_HALVES):
                raise ValueError(
                    f"Expected parameters in fp32, bf16 or fp16, got {parameter.dtype}."
                )

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_like(parameter, self.state_dtype),
            "exp_avg_sq": zeros_like(parameter, self.state_dtype),
        }
        if parameter.dtype in _HALVES:
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
        mb_kernels.adamw_step(
            weights,
            grads,
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            copies,
            [state["step"] for state in states],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            grad_scale=divisor,
            found_inf=skip,
        )
        self._copies.written(parameters)
        self._equal.note(p for p in parameters if p.dtype in _HALVES)


def _follow(master: Tensor, weight: Tensor) -> None:
    """Write `weight` into `master` wherever it is not the master's value, rounded."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))
