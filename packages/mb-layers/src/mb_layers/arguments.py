"""Checks of arguments that several functions share; ValueError for what is refused.

NumPy's numbers are numbers. True and False are not: they are flags in the wrong place.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from mb_layers.tensors import is_dtensor


def described(value: object) -> str:
    """What an error says it got: a tensor's dtype and shape, anything else's type."""
    if isinstance(value, Tensor) and value.is_nested:
        return "a nested tensor, of which .values() are the tokens of all sequences"
    if isinstance(value, Tensor) and is_dtensor(value):
        return "a DTensor, of which .to_local() are this rank's tokens"
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def at_least_1(**counts: Any) -> None:
    """Check integers, given by the names of the arguments."""
    integers(1, **counts)


def integers(least: int, **counts: Any) -> None:
    """Check integers from `least` on, given by the names of the arguments."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral) or count < least:
            raise ValueError(f"expected {name} to be an integer >= {least}, got {count!r}")


def floating(**tensors: Any) -> None:
    """Check tensors of real numbers, given by the names of the arguments."""
    for name, tensor in tensors.items():
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            raise ValueError(
                f"expected {name} to be a floating-point tensor, got {described(tensor)}"
            )


def at_least_0(**numbers: Any) -> None:
    """Check finite numbers, given by the names of the arguments."""
    for name, number in numbers.items():
        if not (_is_finite(number) and number >= 0):
            raise ValueError(f"expected a finite {name} >= 0, got {number!r}")


def finite(**numbers: Any) -> None:
    """Check numbers, given by the names of the arguments."""
    for name, number in numbers.items():
        if not _is_finite(number):
            raise ValueError(f"expected {name} to be a finite number, got {number!r}")


def _is_finite(number: Any) -> bool:
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    return is_number and -math.inf < number < math.inf


def one_number(number: Any, *, name: str) -> Tensor | float | None:
    """A number >= 0 as a float, or a tensor of one number as a scalar; None stays None."""
    if number is None:
        return None
    if isinstance(number, Tensor):
        if number.numel() != 1:
            raise ValueError(f"expected {name} to be one number, got shape {tuple(number.shape)}")
        if number.is_complex() or number.dtype is torch.bool:
            raise ValueError(f"expected {name} to be a real number, got {described(number)}")
        return number if number.dim() == 0 else number.reshape(())
    at_least_0(**{name: number})
    return float(number)  # NumPy's numbers too


def a_module(**modules: Any) -> None:
    """Check modules, given by the names of the arguments."""
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ValueError(f"expected {name} to be a module, got {described(module)}")


def one_of(choices: Sequence[str], **names: Any) -> None:
    """Check names that stand for a choice, given by the names of the arguments."""
    for name, value in names.items():
        if value in choices:
            continue
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}{hint}")


def none_without_capacity(**settings: tuple[Any, Any]) -> None:
    """Refuse what says which slots a capacity drops where there is none: the value, its default."""
    for name, (value, default) in settings.items():
        if value != default:
            raise ValueError(
                f"expected capacity_factor with {name}={value!r}, got None: without one no slot is "
                f"dropped. Give a capacity_factor, or leave {name} out"
            )


def as_mask(mask: Any, shape: Sequence[int], *, name: str = "mask") -> Tensor:
    """The mask as bool: torch's are that, those of transformers int64."""
    counts = isinstance(mask, Tensor) and not (mask.is_floating_point() or mask.is_complex())
    if not counts or mask.shape != shape:  # one of [1] would pass for every token
        raise ValueError(
            f"expected {name} to be bool or integers of shape {tuple(shape)}, one value per token "
            f"and nonzero for the real ones, got {described(mask)}"
        )
    return mask.bool()


def several_names(names: Any) -> None:
    """Check names of weights: a string would be taken for one name a letter."""
    listed = isinstance(names, tuple | list | set | frozenset)
    if not listed or not names or len({*names}) < len(names):
        raise ValueError(
            f"expected names to be a tuple of names of weights, each once, got {names!r}"
        )
