"""Which documents samples were made from, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

_NAMED = 8


def documents_of(dataset: Any, samples: Sequence[int]) -> str:
    """The documents that samples of a dataset are made from, in words.

    Of a dataset that cannot tell, a classifier's, the samples themselves are named.
    """
    if not hasattr(dataset, "documents_of"):
        return f"unknown, samples {_some(samples)}"
    found: dict[str, dict[int, None]] = {}
    for prefix, document in chain.from_iterable(map(dataset.documents_of, samples)):
        found.setdefault(prefix, {})[document] = None
    return "; ".join(
        f"{_some([*documents])} of {prefix}.bin" for prefix, documents in found.items()
    )


def _some(numbers: Sequence[int]) -> str:
    more = len(numbers) - _NAMED
    return ", ".join(map(str, numbers[:_NAMED])) + (f" and {more} more" if more > 0 else "")
