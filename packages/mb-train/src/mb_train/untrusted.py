"""What strangers wrote, read and shown.

`mb_data.untrusted` is imported by the first call, not with this module: NumPy comes with it, which
takes as long as all else that `mb-train --help` imports. So is torch, which takes longer.
"""

from __future__ import annotations

import pickle
import types
from typing import Any, ClassVar


def json_of(text: str | bytes) -> Any:
    """JSON, or JSONDecodeError for what is none; see `mb_data.untrusted.json_of`."""
    from mb_data import untrusted

    return untrusted.json_of(text)


def printable(text: str) -> str:
    """A text that a terminal does not obey; see `mb_data.untrusted.printable`."""
    from mb_data import untrusted

    return untrusted.printable(text)


def dtype_named(module: str, name: str) -> Any:
    """The dtype of torch that a pickle names so; None for what is none."""
    import torch

    found = getattr(torch, name, None) if module == "torch" else None
    return found if isinstance(found, torch.dtype) else None


_InPython: Any = vars(pickle)["_Unpickler"]


class Unpickler(_InPython):
    """Python's own, written in Python, for names that `find_class` lets through.

    It changes objects that the pickle makes, and none that a name stands for: classes and functions
    are everybody's, and would be others for the rest of the process.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def load_build(self) -> None:
        """As the original's."""
        if isinstance(self.stack[-2], (type, types.FunctionType, types.BuiltinFunctionType)):
            raise pickle.UnpicklingError("it changes a class or a function")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
