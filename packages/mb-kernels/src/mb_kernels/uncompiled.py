"""What torch's compiler leaves alone: functions that launch kernels without being ops.

It would trace them down to the launch. There it stops, if not with an error, and begins anew with
every learning rate.
"""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

try:
    from torch._compile import _disable_dynamo
except ImportError:  # the public one imports the compiler, and takes seconds
    from torch.compiler import disable as _disable_dynamo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function``, run as it is, between the graphs of what ``torch.compile`` compiles."""
    apart = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        # The first call of `apart` imports the compiler. While nobody has, nothing is compiled.
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return apart(*args, **kwargs)

    return call
