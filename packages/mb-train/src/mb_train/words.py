"""Sentences that are said in several places, and numbers in them."""

from __future__ import annotations

import math
import os
import shlex


def counted(number: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`. mb-data has the same, but NumPy comes with it."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figure(number: float, digits: int = 0) -> str:
    """With so many digits behind the point, and two that count at least: `1,234`, `0.027`."""
    if number > 0:
        digits = max(digits, 1 - math.floor(math.log10(number)))
    return f"{number:,.{digits}f}"


def typed(path: str | os.PathLike[str]) -> str:
    """A path as a shell takes it behind a flag: quoted if need be, and taken for no other flag."""
    path = os.fspath(path)
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def spelled(name: str) -> str:
    """A file's name, which may be any bytes, with escapes where they are no text in UTF-8."""
    return name.encode(errors="backslashreplace").decode()


def missing_package(name: str, purpose: str, install: str, instead: str = "") -> ValueError:
    """The error where a package is not installed that is no dependency.

    Args:
        purpose: "to draw with", "for --tensorboard-dir".
        install: what pip is given.
        instead: ", or leave the flag out", say.
    """
    return ValueError(
        f"Expected the {name} package {purpose}, found none. Install it with pip install "
        f"{install}{instead}."
    )
