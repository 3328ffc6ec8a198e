"""A run as a TOML file: read with every key and kind checked, written so that it reads back."""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from dataclasses import fields
from typing import Any

from mb_train.config import GROUPS, TrainConfig
from mb_train.config.field import check_kind, none_or, value_types

_TYPES = value_types(TrainConfig)
_FIELDS = {f.name: f for f in fields(TrainConfig)}


class UsageError(ValueError):
    """The command line cannot be understood: one line for stderr, exit code 2."""


def read_toml(path: str) -> tuple[dict[str, Any], str | None]:
    """Fields of a TOML file, and the recipe it names if any. Tables only group keys.

    Raises:
        UsageError: no such file, not TOML, a key that does not exist or stands there twice, a
            value of the wrong kind.
    """
    try:
        with open(path, "rb") as file:  # some editors begin files with a mark
            document = tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"Cannot read --config {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # it may be nested too deeply
        raise UsageError(f"--config {path} is not TOML: {error}.") from None
    flat: dict[str, Any] = {}
    for key, value in document.items():
        for name, item in value.items() if isinstance(value, dict) else [(key, value)]:
            name = name.replace("-", "_")
            if name in flat:
                raise UsageError(f"Expected {name} once in {path}, got it twice.")
            flat[name] = item
    named = flat.pop("recipe", None)
    if named is not None and not isinstance(named, str):
        raise UsageError(f"Expected recipe in {path} to be a name, got {named!r}.")
    for key, value in flat.items():
        if key not in _TYPES:
            near = difflib.get_close_matches(key.lower(), _TYPES, n=1, cutoff=0.5)
            hint = f" The nearest is {near[0]}." if near else " See --help."
            raise UsageError(f"Unknown key {key!r} in {path}.{hint}")
        flat[key] = _checked(key, value, path)
    return flat, named


def _checked(key: str, value: Any, path: str) -> Any:
    kind, value = _TYPES[key], none_or(_FIELDS[key], value)
    if value is None:
        return None
    if typing.get_origin(kind) is list and not isinstance(value, list):
        value = [value]
    try:
        check_kind(key, value, kind)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return float(value) if kind is float and isinstance(value, int) else value


def to_toml(config: TrainConfig) -> str:
    """The configuration as TOML, one table per group; unset fields are comments."""
    lines: list[str] = []
    for group, members in GROUPS.items():
        lines += ([""] if lines else []) + [f"[{group.replace(' ', '-')}]"]
        for f in fields(members):
            value = getattr(config, f.name)
            lines.append(f"# {f.name}" if value is None else f"{f.name} = {_spelled(value)}")
    return "\n".join(lines) + "\n"


def _spelled(value: Any) -> str:
    # JSON's spelling is TOML's as well, but for two things: TOML knows no surrogate pairs, and
    # takes no bare DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
