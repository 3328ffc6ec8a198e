"""What strangers wrote, read and shown: JSON of any depth, text that a terminal must not obey."""

from __future__ import annotations

import json
import re
from typing import Any

# All that a terminal acts upon but new lines and tabs, and what turns the order of letters around.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def json_of(text: str | bytes) -> Any:
    """``json.loads``, for which what is nested too deeply is damaged like everything else.

    Raises JSONDecodeError, a ValueError, for what is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("It is nested too deeply", "", 0) from None


def printable(text: str) -> str:
    """A text with escapes in place of the characters that would move, colour or rename a terminal,
    or show it in another order."""
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
