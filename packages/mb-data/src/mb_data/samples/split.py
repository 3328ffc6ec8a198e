"""Train, validation and test as contiguous ranges of documents, by Megatron's rule."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from itertools import accumulate, pairwise

ROUNDINGS = ("shares", "cumulative")


def parse_split(
    split: str, num_documents: int, *, rounding: str = "shares"
) -> tuple[range, range, range]:
    """Cut ``range(num_documents)`` into train, validation and test: ``"949,50,1"``.

    Shares are separated by commas or slashes, need not sum to anything, and missing ones are zero.
    Quotation marks that a shell has left around them are no part of them, as in Megatron Core.
    Documents are not shuffled before the split.

    With ``rounding="shares"``, the rule of Megatron-LM up to 2023 and so of MegaBlocks' fork, each
    share is rounded to whole documents by itself (halves to even); what the rounding leaves over
    or short moves all three boundaries, so that train absorbs it: ``"949,50,1"`` of 10 documents
    is 10, 0, 0. Where the shift would push a boundary below zero, which Megatron does not survive,
    it stays at zero. With ``rounding="cumulative"``, Megatron Core's rule, the running sums of the
    shares are rounded: ``"949,50,1"`` of 10 documents is 9, 1, 0.

    Raises:
        ValueError: not one to three numbers, none negative, at least one positive; or an unknown
            rounding.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"split rounding {rounding!r}: expected {' or '.join(ROUNDINGS)}")
    separator = "," if "," in split else "/"
    try:
        shares = [float(share) for share in split.strip("'\"").split(separator)]
    except ValueError:
        shares = []
    total = summed(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < total < float("inf"):
        raise ValueError(
            f"split {split!r}: expected one to three shares, none negative and not all zero, "
            'for train, validation and test, such as "969,30,1"'
        )
    shares += [0.0] * (3 - len(shares))
    if rounding == "cumulative":
        # Summed as there, so that a half falls to the same side.
        whole = shares[0] + shares[1] + shares[2]
        sums = accumulate(share / whole for share in shares)
        ends = [round(sum_ * float(num_documents)) for sum_ in sums]
    else:
        ends = list(accumulate(round(share / total * float(num_documents)) for share in shares))
        residue = ends[-1] - num_documents
        ends = [max(end - residue, 0) for end in ends]
    train, valid, test = (range(start, stop) for start, stop in pairwise([0, *ends]))
    return train, valid, test


def summed(numbers: Iterable[float]) -> float:
    """The sum of numbers, rounded after each, as Megatron has it.

    Since Python 3.12 ``sum`` carries the rounding errors along: another order of one blend in five
    would hang on the Python.
    """
    return functools.reduce(operator.add, numbers, 0.0)
