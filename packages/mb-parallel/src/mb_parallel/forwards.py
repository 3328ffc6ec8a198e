"""Something around the forward of a module, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def wrap_forward(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(module, forward, *args, **kwargs)` run in place of the module's forward.

    On the instance: names in the state dict stay, and hooks (FSDP2's) are called around it. Modules
    alike share one function: for one of its own the compiler would compile each of them anew.
    """
    inner = module.forward
    if isinstance(inner, MethodType) and inner.__self__ is module:
        module.forward = MethodType(_around(call, inner.__func__), module)
    else:  # another library's, put on the instance
        module.forward = functools.partial(call, module, inner)


@functools.cache
def _around(call: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(function, self), *args, **kwargs)

    return forward
