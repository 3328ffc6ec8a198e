"""A parameter that several stages of a pipeline share: a tied embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mb_parallel.shards import local
from mb_parallel.world import of_all_ranks


class TiedParameter:
    """A parameter of the first stage, whose rank is the owner, and its copies on other stages.

    Stages on one rank may share one tensor.

    Args:
        names: the parameter's name in a stage's module, by stage, in ascending order.
        module_of: returns the module of a stage, None if this rank does not have it.
        rank_of: returns the rank, in the group, of a stage.

    Raises:
        ValueError: a module has no parameter of that name, or they differ in size or dtype, or only
            some of them are frozen.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        module_of: Callable[[int], nn.Module | None],
        rank_of: Callable[[int], int],
        group: ProcessGroup,
    ) -> None:
        self._group = group
        self._places = [
            (module, name) for stage, name in names.items() if (module := module_of(stage))
        ]
        owner, *others = dict.fromkeys(map(rank_of, names))
        self._owns = owner == group.rank()
        to = others if self._owns else [owner]
        self._peers = [dist.get_global_rank(group, rank) for rank in to] if self._places else []
        self._check(names)
        self._trains = any(parameter.requires_grad for parameter in self._parameters())
        with torch.no_grad():
            self._hand_round([local(parameter) for parameter in self._parameters()])

    def _check(self, names: Mapping[int, str]) -> None:
        """Raise on all ranks if something is wrong on one."""
        found: list[str] = []
        problem = None
        try:
            found = [
                f"{list(local(p).shape)} in {p.dtype}{'' if p.requires_grad else ' (frozen)'}"
                for p in self._parameters()
            ]
        except ValueError as error:
            problem = str(error)
        everyone = of_all_ranks((found, problem), self._group)
        if problems := {told for _, told in everyone if told is not None}:
            raise ValueError("\n".join(sorted(problems)))
        sizes = {size for sizes, _ in everyone for size in sizes}
        if len(sizes) > 1:
            told = " and ".join(sorted(sizes))
            raise ValueError(
                f"Expected {', '.join(dict.fromkeys(names.values()))} to be one parameter on "
                f"stages {', '.join(map(str, names))}, got parts of {told}. Freeze all or none."
            )

    def _parameters(self) -> list[nn.Parameter]:
        """This rank's parameters; looked up each time, since sharding replaces parameters."""
        found = [parameter_of(module, name) for module, name in self._places]
        return list({id(parameter): parameter for parameter in found}.values())

    @property
    def copies(self) -> list[nn.Parameter]:
        """This rank's parameters, except the owner's first."""
        return self._parameters()[self._owns :]

    def set_aside(self) -> list[Tensor | None]:
        """Take away the gradients of earlier steps, which have been added up already.

        Raises:
            ValueError: a parameter was frozen, or is no longer, since the ranks agreed on it.
        """
        if any(parameter.requires_grad != self._trains for parameter in self._parameters()):
            raise ValueError(
                f"Expected a tied parameter with requires_grad={self._trains}, as when the "
                f"pipeline was made, got {not self._trains}: other stages would wait for its "
                "gradient. Make a new Pipeline after freezing or unfreezing it on all its stages."
            )
        earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        return earlier

    @torch.no_grad()
    def add_up(self, earlier: list[Tensor | None]) -> None:
        """Give every parameter the sum of all new gradients, added to what was set aside."""
        parameters = self._parameters()
        if not parameters or not self._trains:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        first, *rest = grads = [local(p.grad) for p in parameters if p.grad is not None]
        for grad in rest:
            first += grad
        for peer in self._peers:
            if self._owns:
                theirs = torch.empty_like(first, memory_format=torch.contiguous_format)
                dist.recv(theirs, peer, group=self._group)
                first += theirs
            else:
                dist.send(first.contiguous(), peer, group=self._group)
        self._hand_round(grads)
        for parameter, before in zip(parameters, earlier, strict=True):
            if before is not None and parameter.grad is not None:
                parameter.grad = before.add_(parameter.grad)

    def _hand_round(self, mine: list[Tensor]) -> None:
        """Write the first tensor of the owner into all tensors of all ranks."""
        for peer in self._peers:
            if self._owns:
                dist.send(mine[0].contiguous(), peer, group=self._group)
            else:
                values = torch.empty_like(mine[0], memory_format=torch.contiguous_format)
                dist.recv(values, peer, group=self._group)
                mine[0].copy_(values)
        for other in mine[1:]:
            other.copy_(mine[0])


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter itself; the module's attribute may be a view of it."""
    path, _, leaf = name.rpartition(".")
    try:
        parameter = module.get_submodule(path)._parameters[leaf]
    except (AttributeError, KeyError):
        parameter = None
    if parameter is None:
        known = ", ".join(known for known, _ in module.named_parameters())
        raise ValueError(f"Expected a tied parameter {name!r} in the stage, which has {known}.")
    return parameter
