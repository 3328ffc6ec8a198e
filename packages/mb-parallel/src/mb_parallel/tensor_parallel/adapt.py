"""How a style changes a module: its class gets a subclass, its parameters stay where they are.

While the module's forward runs, `self.weight` is a view of the parameter: this rank's shard as a
plain tensor, or the parameter with its gradient summed over the ranks. At all other times, and for
`parameters()`, `state_dict()`, FSDP2 and the optimizer, it is the parameter itself, a DTensor if it
is sharded. So the model's code needs no case for DTensors, its casts and functions see plain
tensors, and an op costs the host no more than without tensor parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mb_parallel.engines import is_dtensor
from mb_parallel.shards import part_of
from mb_parallel.tensor_parallel import collectives

View = Callable[[Tensor], Tensor]
Adapted = dict[Hashable, type[nn.Module]]


def adapt(
    module: nn.Module,
    adapted: Adapted,
    how: Hashable,
    *,
    views: Mapping[str, View] | None = None,
    forward: Callable[..., Any] | None = None,
) -> None:
    """Give one module views of its own parameters, by name, and another forward.

    Args:
        adapted: the classes made so far, added to. Modules of the same kind get one class, because
            the compiler compiles anew for each class, and would do so for each layer of a model.
        how: identifies `views` and `forward` apart from the names in `views`: modules of one class
            with equal `how` and names share a class.
        views: by the name of a parameter, a function of it whose result the module's forward sees.
        forward: called as `forward(module, original, *args, **kwargs)`, `original` being its own.
    """
    key = (type(module), how, tuple(views or ()))
    if key not in adapted:
        adapted[key] = _subclass(type(module), views or {}, forward)
    module.__class__ = adapted[key]
    vars(module)["inside_forward"] = False


def _subclass(
    parent: type[nn.Module], views: Mapping[str, View], forward: Callable[..., Any] | None
) -> type[nn.Module]:

    @functools.wraps(parent.forward)  # whose signature others read
    def viewing(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = self.inside_forward
        self.inside_forward = True
        try:
            if forward is None:
                return parent.forward(self, *args, **kwargs)
            return forward(self, functools.partial(parent.forward, self), *args, **kwargs)
        finally:
            self.inside_forward = outer

    body: dict[str, Any] = {name: _viewed(name, view) for name, view in views.items()}
    body |= {"__module__": parent.__module__, "forward": viewing}
    return type(parent.__name__, (parent,), body)


def is_adapted(module: nn.Module) -> bool:
    """Whether `adapt` has changed it."""
    return hasattr(module, "inside_forward")


def _viewed(name: str, view: View) -> property:
    def read(module: Any) -> Tensor:
        parameter = module._parameters[name]
        return view(parameter) if module.inside_forward else parameter

    return property(read)


def shard(module: nn.Module, name: str, dim: int, mesh: DeviceMesh, *, what: str) -> None:
    """Make a parameter of `module` a DTensor, split along `dim` into one part for each rank.

    All ranks have the same values before, so nothing is sent.

    Args:
        what: what the dimension counts, for the error.

    Raises:
        ValueError: the number of ranks does not divide the dimension, or there is no such
            dimension or parameter.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        raise ValueError(f"Expected a parameter {name} in {type(module).__name__}, got none.")
    if is_dtensor(parameter):  # shared with a module that has been sharded already
        return
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"Expected a dimension of {name} of shape {tuple(parameter.shape)} to split, got {dim}."
        )
    size, ranks = parameter.shape[dim], mesh.size()
    if size % ranks:
        raise ValueError(
            f"Expected tp = {ranks} to divide the {what}, got {size} in {name} of shape "
            f"{tuple(parameter.shape)}. Choose a tp that divides it, or pad it."
        )
    module._parameters[name] = part_of(parameter, mesh, [dim])


def to_local(parameter: Tensor) -> Tensor:
    """This rank's shard with its place in the graph, which that of `shards.local` lacks."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def summed(group: ProcessGroup) -> View:
    """View of a replicated parameter that each rank uses for a part: adds up the gradients."""
    return functools.partial(collectives.copy, group=group)


def once(group: ProcessGroup) -> View:
    """View of a replicated parameter that is added before a sum over ranks: zeros but on the first.

    The gradient of the sum is the same on every rank, and is the parameter's whole gradient.
    """
    return functools.partial(_Once.apply, dist.get_rank(group) == 0)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: bool, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter) if first else torch.zeros_like(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]
