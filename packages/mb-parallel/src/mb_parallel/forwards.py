"""Calling a function in place of a module's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_AROUND = "_mb_around"


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(module, forward, *args, **kwargs)` run in place of the module's forward.

    It is set on the instance, so that names in the state dict stay, and hooks (FSDP2's) are called
    around it. Modules of the same kind share one function, because the compiler would compile each
    of them anew if each had its own.
    """
    inner = module.forward
    if isinstance(inner, MethodType) and inner.__self__ is module:
        module.forward = MethodType(_around(call, inner.__func__), module)
    else:  # another library's, put on the instance
        module.forward = functools.partial(call, module, inner)


def _around(call: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    # On the function, to go with it: one that was put on an instance may hold a mesh.
    owner, made = vars(function).get(_AROUND, (None, {}))
    if owner is not function:  # functools.wraps copies what is on a function
        made = {}
        vars(function)[_AROUND] = function, made
    if call not in made:

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return call(self, functools.partial(function, self), *args, **kwargs)

        made[call] = forward
    return made[call]
