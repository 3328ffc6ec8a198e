"""The index builders as plain loops: one step at a time, the way the format is explained.

Oracle of the tests, baseline of the benchmark, and the place to read what the vectorised builders
compute. Nothing in the package calls them.
"""

from __future__ import annotations

from collections.abc import Sequence


def build_sample_idx(
    sizes: Sequence[int], doc_idx: Sequence[int], seq_length: int, num_samples: int
) -> list[tuple[int, int]]:
    """Where samples start: [num_samples + 1] of (position in ``doc_idx``, token in the document).

    Walks along the documents, taking ``seq_length + 1`` tokens for each sample and stepping back
    by the one token that neighbours share.
    """
    position, offset = 0, 0
    rows = [(position, offset)]
    for _ in range(num_samples):
        missing = seq_length + 1
        while True:
            left = sizes[doc_idx[position]] - offset
            if left >= missing:
                offset += missing - 1
                break
            missing -= left
            position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


def blend_order(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """Source and number there of each of ``size`` samples, for weights that sum to 1."""
    sources: list[int] = []
    numbers: list[int] = []
    taken = [0] * len(weights)
    for n in range(size):
        lag = [w * max(float(n), 1.0) - t for w, t in zip(weights, taken, strict=True)]
        furthest = lag.index(max(lag))
        sources.append(furthest)
        numbers.append(taken[furthest])
        taken[furthest] += 1
    return sources, numbers
