"""Models without numbers, to be counted or to be given weights from elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def unfilled(device: torch.device | str = "meta") -> Generator[None]:
    """Within it modules are built on `device`, and no initial weights are drawn.

    Drawing them on the meta device computes nothing, but imports torch's compiler. Elsewhere it
    takes time, and moves the caller's random numbers on.
    """
    with torch.device(device), _NoInitialWeights():
        yield


class _NoInitialWeights(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)
