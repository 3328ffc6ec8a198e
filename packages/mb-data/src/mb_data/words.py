"""Sentences that are said in several places, and numbers in them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,024 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def missing_package(name: str, wanted: str, extra: str, more: str = "") -> ModuleNotFoundError:
    """The error where a package of one of mb-data's extras is not installed.

    Args:
        name: what is imported.
        wanted: what needs it, "FILE is a Parquet file".
        extra: of mb-data's, that has it.
        more: ", and the package of that store".
    """
    return ModuleNotFoundError(f"{wanted}: pip install 'mb-data[{extra}]'{more}", name=name)
