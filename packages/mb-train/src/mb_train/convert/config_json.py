"""Reading a config.json: settings that our models do not have are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def refuse(config: Json, **allowed: Any) -> None:
    """Raise ValueError if the file has one of these settings with a value that is not allowed."""
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"Expected {name} of config.json to be {' or '.join(map(repr, values))}, got "
                f"{config[name]!r}: this model has something that ours have not."
            )
