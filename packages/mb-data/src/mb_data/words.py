"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,024 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
