"""A parameter that the first and the last stage of a pipeline share: a tied embedding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


class TiedParameter:
    """The parameter on the first stage, its copy on the last; one tensor if one rank has both.

    Args:
        names: in the first stage's module and in the last's.
        first, last: those modules, None where this rank does not have them.
        ranks: in the group, of the first and the last stage.

    Raises:
        ValueError: a module has no parameter of that name.
    """

    def __init__(
        self,
        names: tuple[str, str],
        first: nn.Module | None,
        last: nn.Module | None,
        ranks: tuple[int, int],
        group: ProcessGroup,
    ) -> None:
        self.names, self.modules = names, (first, last)
        self.group = group
        self.peer = None
        if ranks[0] != ranks[1] and (first is not None or last is not None):
            self.peer = dist.get_global_rank(group, ranks[1] if first is not None else ranks[0])
        self._equalize()

    def _parameters(self) -> list[nn.Parameter]:
        """Those of this rank; looked up anew, for sharding replaces parameters."""
        found: dict[int, nn.Parameter] = {}
        for name, module in zip(self.names, self.modules, strict=True):
            if module is not None:
                parameter = parameter_of(module, name)
                found[id(parameter)] = parameter
        return list(found.values())

    @property
    def copy(self) -> nn.Parameter | None:
        """The last stage's, if this rank has it and it is not the first's own."""
        parameters = self._parameters()
        if self.modules[1] is None or (self.modules[0] is not None and len(parameters) == 1):
            return None
        return parameters[-1]

    @torch.no_grad()
    def _equalize(self) -> None:
        parameters = [plain(parameter) for parameter in self._parameters()]
        if len(parameters) == 2:
            parameters[1].copy_(parameters[0])
        if self.peer is None:
            return
        (mine,) = parameters
        if self.modules[0] is not None:
            dist.send(mine.contiguous(), self.peer, group=self.group)
        else:
            values = torch.empty_like(mine, memory_format=torch.contiguous_format)
            dist.recv(values, self.peer, group=self.group)
            mine.copy_(values)

    def set_aside(self) -> list[Tensor | None]:
        """Take away the gradients that are there already: they have been added up."""
        earlier = [parameter.grad for parameter in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        return earlier

    @torch.no_grad()
    def add_up(self, earlier: list[Tensor | None]) -> None:
        """Give both the sum of their new gradients, and what was set aside."""
        parameters = self._parameters()
        grads = [plain(p.grad) for p in parameters if p.grad is not None]
        if len(grads) == 2:
            grads[0] += grads[1]
            grads[1].copy_(grads[0])
        if self.peer is not None and grads:
            (mine,) = grads
            sent, theirs = mine.contiguous(), torch.empty_like(mine).contiguous()
            ops = [
                dist.P2POp(dist.isend, sent, self.peer, self.group),
                dist.P2POp(dist.irecv, theirs, self.peer, self.group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            mine += theirs
        for parameter, before in zip(parameters, earlier, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter itself, whatever view of it the module's attribute gives."""
    path, _, leaf = name.rpartition(".")
    try:
        parameter = module.get_submodule(path)._parameters[leaf]
    except (AttributeError, KeyError):
        parameter = None
    if parameter is None:
        known = ", ".join(known for known, _ in module.named_parameters())
        raise ValueError(f"Expected a tied parameter {name!r} in the stage, which has {known}.")
    return parameter


def plain(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor; changes to it are changes to that."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
