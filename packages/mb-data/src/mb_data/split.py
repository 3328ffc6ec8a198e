"""Train, validation and test as contiguous ranges of documents, by Megatron's rule."""

from __future__ import annotations

from itertools import pairwise


def parse_split(split: str, num_documents: int) -> tuple[range, range, range]:
    """Cut ``range(num_documents)`` into train, validation and test: ``"949,50,1"``.

    Shares are separated by commas or slashes, need not sum to anything, and missing ones are zero.
    Each share is rounded to whole documents by itself (halves to even); what the rounding leaves
    over or short moves all three boundaries, so that train absorbs it: ``"949,50,1"`` of 10
    documents is 10, 0, 0. Documents are not shuffled before the split. Where the shift would push
    a boundary below zero, which Megatron does not survive, it stays at zero.

    Raises:
        ValueError: not one to three numbers, none negative, at least one positive.
    """
    separator = "," if "," in split else "/"
    try:
        shares = [float(share) for share in split.split(separator)]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < total < float("inf"):
        raise ValueError(
            f"split {split!r}: expected one to three shares, none negative and not all zero, "
            'for train, validation and test, such as "969,30,1"'
        )
    shares += [0.0] * (3 - len(shares))
    boundaries = [0]
    for share in shares:
        boundaries.append(boundaries[-1] + round(share / total * float(num_documents)))
    residue = boundaries[-1] - num_documents
    boundaries = [0, *(max(boundary - residue, 0) for boundary in boundaries[1:])]
    train, valid, test = (range(start, stop) for start, stop in pairwise(boundaries))
    return train, valid, test
