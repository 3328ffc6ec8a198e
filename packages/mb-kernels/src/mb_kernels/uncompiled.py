"""What torch's compiler leaves alone: exchanges between ranks, and kernel launches that are no ops.

It would trace them down to the collective or the launch. There it stops, if not with an error, and
begins anew with every number of rows or learning rate.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

try:
    from torch._compile import _disable_dynamo
except ImportError:  # the public one imports the compiler at once, and takes seconds
    from torch.compiler import disable as _disable_dynamo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function``, run as it is, between the graphs of what ``torch.compile`` compiles.

    Its first call imports the compiler, as DTensors do too.
    """
    return _disable_dynamo(function)


def uncompiled_step(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``uncompiled``, for an optimizer's step: it does not import the compiler by itself.

    Too slow for what runs in every layer, since the compiler traces the frame that is added here.
    """
    apart = uncompiled(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            return function(*args, **kwargs)
        return apart(*args, **kwargs)

    return call
