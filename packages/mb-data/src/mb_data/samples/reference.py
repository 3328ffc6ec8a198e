"""The index builders as plain loops: one step at a time, the way the format is explained.

Oracle of the tests, baseline of the benchmark, and the place to read what the vectorised builders
compute. Nothing in the package calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


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


def sample_mapping(
    sizes: Sequence[int],
    boundaries: Sequence[int],
    *,
    max_length: int,
    min_sentences: int,
    num_samples: int,
    draw: Callable[[], int] | None,
    short_ratio: int = 0,
) -> list[tuple[int, int, int]]:
    """BERT and T5 samples before the shuffle: first sentence, end, target length.

    ``draw`` gives the outputs of a 32-bit generator; one in ``short_ratio`` targets is short.
    """

    def target() -> int:
        if draw is None:
            return max_length
        number = draw()
        return 2 + number % (max_length - 1) if number % short_ratio == 0 else max_length

    rows: list[tuple[int, int, int]] = []
    while not rows or len(rows) < num_samples:
        for document in range(len(boundaries) - 1):
            first, last = boundaries[document], boundaries[document + 1]
            if last - first < min_sentences:
                continue
            if last - first > 1 and any(sizes[i] > 512 for i in range(first, last)):
                continue
            wanted, tokens, sentences = target(), 0, 0
            for i in range(first, last):
                tokens += sizes[i]
                sentences += 1
                left = last - 1 - i
                full = tokens >= wanted and sentences >= min_sentences and left > 1
                if full or left == 0:
                    rows.append((first, i + 1, wanted))
                    first, tokens, sentences = i + 1, 0, 0
                    wanted = target()
    return rows


def block_mapping(
    sizes: Sequence[int],
    boundaries: Sequence[int],
    title_sizes: Sequence[int],
    *,
    max_length: int,
    min_sentences: int,
    num_samples: int,
) -> list[tuple[int, int, int, int]]:
    """ICT blocks before the shuffle: first sentence, end, document, number."""
    rows: list[tuple[int, int, int, int]] = []
    while not rows or len(rows) < num_samples:
        number = 0
        for document in range(len(boundaries) - 1):
            first, last = boundaries[document], boundaries[document + 1]
            if last - first < min_sentences:
                continue
            if any(sizes[i] > 512 for i in range(first, last)):
                continue
            wanted, tokens, sentences = max_length - title_sizes[document], 0, 0
            for i in range(first, last):
                tokens += sizes[i]
                sentences += 1
                left = last - 1 - i
                full = tokens >= wanted and min(sentences, left) >= min_sentences
                if full or left == 0:
                    rows.append((first, i + 1, document, number))
                    first, tokens, sentences = i + 1, 0, 0
                    number += 1
    return rows
