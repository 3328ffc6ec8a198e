"""What strangers wrote, read and shown, as in `mb_data.untrusted`, which would import NumPy."""

from __future__ import annotations

import json
import re
from typing import Any

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


def printable(text: str) -> str:
    """A text with escapes for what would move, colour or rename a terminal, or reorder letters."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
