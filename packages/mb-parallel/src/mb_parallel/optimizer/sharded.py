"""What the optimizers of this package share: state in shards, steps skipped on the device.

`describe` says what an optimizer keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any

import torch
from mb_kernels.uncompiled import uncompiled_step
from torch import Tensor

from mb_parallel.arguments import at_least_0
from mb_parallel.gradient_sync import drop_apart, refuse_apart
from mb_parallel.shards import local, on_meta, zeros_like

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
    # What saved state may lack: it begins as if fresh.
    _made_anew: tuple[str, ...] = ()
    # Options of torch's optimizers that are not obeyed here, with what is done instead.
    _fixed: Mapping[str, Any] = MappingProxyType({"maximize": False, "differentiable": False})

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Fresh state of a parameter."""
        raise NotImplementedError

    def on_host(self, parameter: Tensor, key: str) -> bool:
        """Whether this tensor of a parameter's state is in the host's memory, wherever it is."""
        return False

    def update(
        self, group: dict[str, Any], parameters: list[Tensor], divisor: Tensor, skip: Tensor
    ) -> None:
        """Step `parameters`, which are on one device and have a gradient, with `group`'s rates.

        divisor, skip: fp32 scalars on the device. Gradients are divided by the first; nothing is
            changed if the second is 1.
        """
        raise NotImplementedError

    def rehearse(
        self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Launch what `update` would, on meta tensors: for `rehearse_step`. Nothing is written."""

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a group with parameters or rates that cannot be trained with."""
        at_least_0(lr=group["lr"], weight_decay=group["weight_decay"])
        for name, value in self._fixed.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"Expected a group with {name}={value!r}, got {group[name]!r}, which "
                    f"{type(self).__name__} of this package does not obey. Leave the entry out, or "
                    "take the optimizer of torch that does."
                )

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
        drop_apart(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Parameters without a gradient, and their state, stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            refuse_apart(p for group in self.param_groups for p in group["params"])
        self._step_groups()
        return loss

    @uncompiled_step
    def _step_groups(self) -> None:
        for group in self.param_groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.make_state(parameter)
                by_device.setdefault(parameter.device, []).append(parameter)
            for device, parameters in by_device.items():
                divisor = self._flag("grad_scale", 1.0, device)
                self.update(group, parameters, divisor, self._flag("found_inf", 0.0, device))

    def _flag(self, name: str, default: float, device: torch.device) -> Tensor:
        value = getattr(self, name, None)
        if value is None:
            return torch.full((), default, dtype=torch.float32, device=device)
        return value.to(device, torch.float32).reshape(())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, except that state keeps its dtypes; torch casts it to the parameter's.

        State is copied. What is this optimizer's own, as `torch.distributed.checkpoint` filled it
        in place, stays where it is.

        Entries that a group lacks stay as they are: torch's flat state dicts leave out empty ones.

        Raises:
            ValueError: groups of other parameters or rates that cannot be trained with; state of
                another kind of optimizer or of other sizes, as of whole parameters where they are
                sharded. Nothing is loaded then.
        """
        own = {id(value) for state in self.state.values() for value in state.values()}
        loaded: dict[str, Any] = {}

        def look(_: Any, adapted: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._checked(adapted))
            # Torch would first copy a parameter's state to where that is, in its dtype.
            ids = {id_ for group in loaded["param_groups"] for id_ in group["params"]}
            others = {key: value for key, value in loaded["state"].items() if key not in ids}
            return {**loaded, "state": others}

        # Behind the caller's hooks that adapt it, as to another order, before those that read it.
        before = self.register_load_state_dict_pre_hook(look)
        after = self.register_load_state_dict_post_hook(
            lambda _: self._take_over(loaded, own), prepend=True
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            before.remove()
            after.remove()

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with whole groups; ValueError for what `load_state_dict` refuses."""
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
        return {**state_dict, "param_groups": given}

    def _take_over(self, state_dict: Mapping[str, Any], own: Set[int]) -> None:
        """Take state that torch was not shown."""
        saved = [id_ for group in state_dict["param_groups"] for id_ in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for id_, parameter in zip(saved, mine, strict=True):
            if values := state_dict["state"].get(id_):
                self.state[parameter] = self._taken_over(parameter, values, own)

    def _taken_over(
        self, parameter: Tensor, values: Mapping[str, Any], own: Set[int]
    ) -> dict[str, Any]:
        """Saved state where the parameter is, in its planned dtypes; fresh what it lacks.

        Tensors are copied but for `own`, by id: another optimizer may go on with them.
        """
        state, planned = dict(values), self.planned_state(parameter)
        for key, value in values.items():
            if isinstance(value, Tensor):
                dtype = planned.get(key, value).dtype
                copy = id(value) not in own
                if copy and self.on_host(parameter, key):
                    state[key] = zeros_like(parameter, dtype, on_host=True).copy_(value)
                elif not self.on_host(parameter, key):
                    state[key] = value.to(parameter.device, dtype, copy=copy)
        lacking = [key for key in planned if state.get(key) is None]
        fresh = self.make_state(parameter) if lacking else {}
        return state | {key: fresh[key] for key in lacking}

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
        return self.make_state(on_meta(parameter))


def describe(optimizer: torch.optim.Optimizer) -> str:
    """A line per kind of tensor: dtypes and this rank's GB of weights, and of state to come.

    An optimizer of this package is described before its first step too, one of torch's has no
    state until then.
    """
    kinds: dict[str, dict[torch.dtype, int]] = {}

    def count(kind: str, tensor: Tensor) -> None:
        tensor = local(tensor)
        sizes = kinds.setdefault(kind, {})
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()

    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        count("weights", parameter)
        state = optimizer.state.get(parameter)
        ours = isinstance(optimizer, ShardedOptimizer)
        if not state and ours:
            state = optimizer.planned_state(parameter)
        for kind, value in (state or {}).items():
            if isinstance(value, Tensor):
                away = ours and parameter.is_cuda and optimizer.on_host(parameter, kind)
                count(f"{kind} on the host" if away else kind, value)
    lines = [f"{type(optimizer).__name__} on this rank:"]
    for kind, sizes in kinds.items():
        parts = [f"{n / 1e9:.3f} GB {str(d).removeprefix('torch.')}" for d, n in sizes.items()]
        lines.append(f"  {kind}: {', '.join(parts)}")
    if len(kinds) < 2:
        lines.append("  no state before the first step")
    return "\n".join(lines)
