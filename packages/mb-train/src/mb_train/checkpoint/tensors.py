"""The tensors of models and optimizers by names that no layout of ranks and no wrapper changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Modules = nn.Module | Sequence[nn.Module]
Optimizer = torch.optim.Optimizer | None

# What wrappers put into a parameter's name: torch.compile, and checkpoint_wrapper.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def tensors_of(model: Modules, optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's tensors by stable names: `model.NAME`, and `optimizer.KIND.NAME` of parameters.

    Counters that an optimizer keeps as plain numbers are there as scalars. What stages on this rank
    share, such as tied embeddings, is there once, and so is what a module has under two names.
    """
    return dict(named_tensors(model, optimizer))


def named_tensors(model: Modules, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Those of `tensors_of`, what several stages on this rank have once for each."""
    again = _second_names(model)
    for module in parts_of(model):
        for name, tensor in module.state_dict().items():
            name = f"model.{plain_name(name)}"
            if name not in again:
                yield name, tensor
    for entry, kind, name in optimizer_entries(model, optimizer):
        value = entry[kind]
        number = isinstance(value, (int, float))
        yield name, torch.tensor(value, dtype=torch.float64) if number else value


def state_names(names: Iterable[str]) -> set[str]:
    """Those of the names of `tensors_of` that are of an optimizer's state."""
    return {name for name in names if name.startswith("optimizer.")}


def _second_names(model: Modules) -> set[str]:
    """Of tensors that a module has under an earlier name too: a tower for both kinds of text."""
    found = set()
    for module in parts_of(model):
        for named in (module.named_parameters, module.named_buffers):
            every = {name for name, _ in named(remove_duplicate=False)}
            again = every - {name for name, _ in named()}
            found |= {f"model.{plain_name(name)}" for name in again}
    return found


def plain_name(name: str) -> str:
    """A parameter's name in the model as it was built, whatever has been wrapped around it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parts_of(model: Modules) -> Sequence[nn.Module]:
    """A module by itself, or the parts of a pipeline that a rank has."""
    return [model] if isinstance(model, nn.Module) else model


def optimizer_entries(
    model: Modules, optimizer: Optimizer
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each tensor or number in an optimizer's state: its dict, its key there, its full name."""
    if optimizer is None:
        return
    for parameter, name in named_parameters(model):
        entry = optimizer.state.get(parameter, {})
        for kind, value in entry.items():
            if isinstance(value, (Tensor, int, float)):
                yield entry, kind, f"optimizer.{kind}.{name}"


def named_parameters(model: Modules) -> Iterator[tuple[nn.Parameter, str]]:
    """Each parameter and its plain name."""
    for module in parts_of(model):
        for name, parameter in module.named_parameters():
            yield parameter, plain_name(name)
