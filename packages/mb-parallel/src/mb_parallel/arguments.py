"""Checks of arguments that several functions share; ValueError for what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from mb_layers.arguments import at_least_1 as at_least_1
from mb_layers.arguments import one_of as one_of
from torch import Tensor, nn

from mb_parallel.engines import is_wrapper


def at_least_0(**numbers: Any) -> None:
    """Check numbers, infinite ones and tensors among them, given by the names of the arguments."""
    wrong = [
        f"{name}={number!r}"
        for name, number in numbers.items()
        if not (isinstance(number, Real | Tensor) and number >= 0)
    ]
    if wrong:
        raise ValueError(f"Expected {', '.join(numbers)} of at least 0, got {', '.join(wrong)}.")


def above_0(**numbers: Any) -> None:
    """Check numbers, given by the names of the arguments."""
    for name, number in numbers.items():
        if not (isinstance(number, Real) and number > 0):
            raise ValueError(f"Expected {name} above 0, got {number!r}.")


def one_module(model: nn.Module) -> None:
    """Check that this is a module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"Expected one module, got {type(model).__name__}. Call this for each part of a model."
        )


def unwrapped(model: nn.Module) -> None:
    """Check that no part of the model is in a wrapper of torch's that reduces gradients."""
    for wrapper in filter(is_wrapper, model.modules()):
        raise ValueError(
            f"Expected a model that nothing is wrapped around, got {type(wrapper).__name__}, which "
            "averages gradients of the parameters it found. Parallelize the model itself, with "
            "apply_data_parallel in place of the wrapper."
        )


def several(modules: Iterable[nn.Module], what: str) -> list[nn.Module]:
    """The modules as a list, checked."""
    if not isinstance(modules, Iterable):
        raise ValueError(
            f"Expected {what} to be several modules, got one {type(modules).__name__}. Pass its "
            "blocks, or [it]."
        )
    found = list(modules)
    for module in found:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"Expected {what} to be several modules, got {module!r} among them. Of a "
                "ModuleDict pass its values()."
            )
    return found


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """What ranks that hold a model together have in common, by name: sizes, dtypes, what trains."""
    return {
        name: (tuple(p.shape), p.dtype, "trains" if p.requires_grad else "frozen")
        for name, p in model.named_parameters()
    }


def several_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """One, several or None as a list, checked."""
    one = isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable)
    found = [] if given is None else [given] if one else list(given)
    for optimizer in found:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"Expected optimizer to be one or several, got {type(optimizer).__name__}."
            )
    return found


def tensors(given: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The tensors as a list, checked, each once.

    A single tensor gives a list of one, not of its rows.
    """
    one = isinstance(given, Tensor) or not isinstance(given, Iterable)
    found = [given] if one else list(given)
    for tensor in found:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"Expected tensors, such as model.parameters(), got {type(tensor).__name__}."
            )
    return list({id(tensor): tensor for tensor in found}.values())


def floating(**dtypes: Any) -> None:
    """Check floating-point dtypes, given by the names of the arguments."""
    for name, dtype in dtypes.items():
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"Expected {name} to be a floating-point dtype such as torch.bfloat16, got "
                f"{dtype!r}."
            )


def device_type_name(device_type: Any) -> None:
    """Check the name of a kind of device."""
    if device_type not in ("cpu", "cuda"):
        raise ValueError(
            f'Expected device_type "cpu" or "cuda" (ROCm\'s name too), got {device_type!r}. Of a '
            "torch.device pass its type."
        )


def is_pair(given: Any) -> bool:
    """Whether these are two numbers."""
    pair = isinstance(given, tuple | list) and len(given) == 2
    return pair and all(isinstance(number, Real | Tensor) for number in given)
