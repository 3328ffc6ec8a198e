"""Reading a config.json: settings that our models do not have are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mb_train.untrusted import json_of

Json = Mapping[str, Any]


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it cannot be read, or holds none.
    """
    try:
        found = json_of(file.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, got {type(found).__name__}")
    except OSError as error:
        raise ValueError(f"Cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}.") from None
    return found


def refuse(config: Json, **allowed: Any) -> None:
    """Raise ValueError if the file has one of these settings with a value that is not allowed."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"Expected {name} of config.json to be {' or '.join(map(repr, values))}, got "
                f"{config[name]!r}: this model has something that ours have not."
            )
