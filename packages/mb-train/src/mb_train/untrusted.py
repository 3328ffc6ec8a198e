"""What strangers wrote, read and shown, as in `mb_data.untrusted`, which would import NumPy."""

from __future__ import annotations

import json
import pickle
import re
import types
from typing import Any, ClassVar

# All that a terminal acts upon but new lines and tabs, and what turns the order of letters around.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def json_of(text: str | bytes) -> Any:
    """`json.loads`, for which what is nested too deeply is damaged like everything else.

    Raises:
        JSONDecodeError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("It is nested too deeply", "", 0) from None


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


def printable(text: str) -> str:
    """A text with escapes for what would move, colour or rename a terminal, or reorder letters."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
