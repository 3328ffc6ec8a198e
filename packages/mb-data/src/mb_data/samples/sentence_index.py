"""Which sentences make a sample: the index behind the BERT, T5 and ICT datasets.

Sentences of a document are added to a sample until it reaches its target length; it ends there
unless a single sentence would be left over, or it would have too few. The order and the random
targets for a seed are Megatron-LM's, number for number, shuffle included.

Documents with a sentence of more than 512 tokens are left out: such a sentence is no sentence. That
is told when an index is built, where they hold a hundredth of the text or more.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import IndexedDataset, checked_index
from mb_data.mersenne import permutation
from mb_data.samples.index_cache import IndexArrays, digest, load_or_build

LONGEST_SENTENCE = 512
_EXAMINED = 2  # sentences of documents whose sentences are looked at, for BERT and T5
_TOLD_FROM = 0.01  # share of the tokens that is left out: nearly every text has some
BLOCK = 1 << 20  # sentences whose running total is copied at a time: 8 MiB


class SentenceSamples:
    """What the datasets of BERT, T5 and ICT share: each sample is a row of an index.

    Attributes:
        mapping: [samples, columns], see ``sample_mapping`` and ``block_mapping``.
    """

    indexed: IndexedDataset
    seed: int
    _index: IndexArrays

    @property
    def mapping(self) -> npt.NDArray:
        return self._index["mapping"]

    def __len__(self) -> int:
        return len(self.mapping)

    def documents_of(self, index: int) -> list[tuple[str, int]]:
        """Prefix, and number there, of the document that sample ``index`` is from."""
        first = self.mapping[index][0]
        # Behind it the next document begins; those without sentences begin there too.
        document = np.searchsorted(self.indexed.document_indices, first, side="right") - 1
        return [(self.indexed.prefix, int(document))]

    def _row(self, index: int) -> tuple[list[int], np.random.RandomState]:
        """A sample's row, and the generator of all that is drawn for it."""
        index = checked_index(index, len(self), "sample", self.indexed.prefix)
        rng = np.random.RandomState((self.seed + index) % 2**32)
        return self.mapping[index].tolist(), rng

    def _text_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample's text, cut at its target: [samples]; of ``sample_mapping``."""
        first, end, target = np.asarray(self.mapping, np.int64).T
        before = np.concatenate([[0], np.cumsum(self.indexed.sizes, dtype=np.int64)])
        return np.minimum(before[end] - before[first], target)


def count_documents(indexed: IndexedDataset) -> int:
    """How many documents a dataset has whose sequences are sentences."""
    return indexed.num_documents


def sample_mapping(
    indexed: IndexedDataset,
    documents: range,
    *,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    num_samples: int,
    seed: int,
    cache_dir: str | os.PathLike[str] | None,
) -> IndexArrays:
    """``mapping``: ``build_sample_mapping`` of a range of documents, through the index cache."""
    indexed.check_plain()
    boundaries = indexed.boundaries(documents)
    settings: dict[str, Any] = {
        "max_length": max_length,
        "short_seq_prob": short_seq_prob,
        "min_sentences": min_sentences,
        "num_samples": num_samples,
        "seed": seed,
    }
    key = {"kind": "sentences", "sizes": _digest(indexed, boundaries), **settings}

    def build() -> dict[str, npt.NDArray]:
        with _naming(indexed):
            mapping = build_sample_mapping(indexed.sizes, boundaries, **settings)
        _tell_left_out(indexed, boundaries, examine_from=_EXAMINED)
        return {"mapping": mapping}

    return load_or_build(key, build, prefix=indexed.prefix, cache_dir=cache_dir)


def block_mapping(
    indexed: IndexedDataset,
    documents: range,
    title_sizes: npt.NDArray[np.int32],
    *,
    max_length: int,
    min_sentences: int,
    num_samples: int,
    seed: int,
    cache_dir: str | os.PathLike[str] | None,
) -> IndexArrays:
    """``mapping``: ``build_block_mapping`` of a range of documents, through the index cache."""
    indexed.check_plain()
    boundaries = indexed.boundaries(documents)
    settings: dict[str, Any] = {
        "max_length": max_length,
        "min_sentences": min_sentences,
        "num_samples": num_samples,
        "seed": seed,
    }
    key = {
        "kind": "blocks",
        "sizes": _digest(indexed, boundaries),
        "titles": digest(title_sizes),
        "first_document": documents.start,
        **settings,
    }

    def build() -> dict[str, npt.NDArray]:
        with _naming(indexed):
            mapping = build_block_mapping(indexed.sizes, boundaries, title_sizes, **settings)
        _tell_left_out(indexed, boundaries, examine_from=min_sentences)
        mapping[:, 2] += documents.start
        return {"mapping": mapping}

    return load_or_build(key, build, prefix=indexed.prefix, cache_dir=cache_dir)


@contextlib.contextmanager
def _naming(indexed: IndexedDataset) -> Generator[None]:
    """Errors that say which dataset they are about, of the several that a blend may have."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{indexed.prefix}: {error}") from error


def build_sample_mapping(
    sizes: npt.NDArray[np.int32],
    boundaries: npt.NDArray[np.int64],
    *,
    max_length: int,
    short_seq_prob: float,
    min_sentences: int,
    num_samples: int,
    seed: int,
) -> npt.NDArray:
    """Samples (first sentence, sentence after the last, target length): [n, 3], shuffled.

    As many epochs as give ``num_samples``, at least one. A target is ``max_length``, or with
    probability 1 / round(1 / ``short_seq_prob``) a shorter one, from 2 up.

    Args:
        sizes: int32, tokens of every sentence.
        boundaries: int64 [documents + 1], the first sentence of each document and the end.
        min_sentences: of a sample: 2 for sentence pairs, else 1.

    Returns:
        uint32, or int64 if sentences are more than 2**32.

    Raises:
        ValueError: no document is fit.
    """
    fit = _fit_documents(sizes, boundaries, min_sentences, examine_from=_EXAMINED)
    base = int(boundaries[0])
    firsts, lasts = boundaries[:-1][fit] - base, boundaries[1:][fit] - base
    totals = _running_total(sizes, boundaries)
    draw = _targets(max_length, short_seq_prob, seed).__next__
    cuts = [0, *(np.flatnonzero(np.diff(firsts // BLOCK)) + 1).tolist(), len(firsts)]
    dtype = np.uint32 if len(sizes) < 2**32 else np.int64
    parts: list[npt.NDArray] = []
    made = 0
    while not made or made < num_samples:
        for begin, stop in pairwise(cuts):
            rows = _walk(firsts[begin:stop], lasts[begin:stop], totals, min_sentences, draw)
            parts.append((rows + np.array([base, base, 0])).astype(dtype))
            made += len(rows)
    return np.concatenate(parts)[permutation(made, seed + 1)]


def build_block_mapping(
    sizes: npt.NDArray[np.int32],
    boundaries: npt.NDArray[np.int64],
    title_sizes: npt.NDArray[np.int32],
    *,
    max_length: int,
    min_sentences: int,
    num_samples: int,
    seed: int,
) -> npt.NDArray:
    """Blocks (first sentence, sentence after the last, document, block number): [n, 4], shuffled.

    A document's target is ``max_length`` less its title. Every epoch has the same blocks, numbered
    from 0 in the order of the text; as many epochs as give ``num_samples``, at least one.

    Args:
        sizes, boundaries: as above.
        title_sizes: int32 [documents].
        min_sentences: of a block, and what is left over after it.

    Returns:
        uint32, or int64 if sentences are more than 2**32; documents count from ``boundaries[0]``.
    """
    fit = np.flatnonzero(
        _fit_documents(sizes, boundaries, min_sentences, examine_from=min_sentences)
    )
    base = int(boundaries[0])
    totals = _running_total(sizes, boundaries)
    document, start = fit, boundaries[fit]
    columns: list[tuple[npt.NDArray, ...]] = []
    while len(document):  # the next block of every document that has one
        last = boundaries[document + 1]
        target = max_length - title_sizes[document]
        reached = np.searchsorted(totals, totals[start - base] + target) + base
        # A target of 0 or less, under a long title, is reached with the first sentence.
        end = np.maximum(np.maximum(reached, start + 1), start + min_sentences)
        end = np.where(last - end >= min_sentences, end, last)
        columns.append((start, end, document))
        more = end < last
        document, start = document[more], end[more]
    blocks = np.stack([np.concatenate(column) for column in zip(*columns, strict=True)], axis=1)
    blocks = blocks[np.argsort(blocks[:, 0])]
    numbered = np.column_stack((blocks, np.arange(len(blocks))))
    dtype = np.uint32 if len(sizes) < 2**32 else np.int64
    epochs = max(1, -(-num_samples // len(blocks)))
    mapping = np.tile(numbered.astype(dtype), (epochs, 1))
    return mapping[permutation(len(mapping), seed + 1)]


def _fit_documents(
    sizes: npt.NDArray[np.int32],
    boundaries: npt.NDArray[np.int64],
    min_sentences: int,
    *,
    examine_from: int,
) -> npt.NDArray[np.bool_]:
    """Documents [D] with enough sentences, none of them too long.

    Megatron examines documents of ``examine_from`` sentences or more: T5 takes a single sentence
    of any length, ICT does not.
    """
    count = np.diff(boundaries)
    fit = (count >= min_sentences) & ~_left_out(sizes, boundaries, examine_from)
    if not fit.any():
        raise ValueError(
            f"none of {len(count):,} documents has {min_sentences} sentences or more, all of at "
            f"most {LONGEST_SENTENCE} tokens; was the text split into sentences "
            "(mb-data preprocess --split-sentences)?"
        )
    return fit


def _left_out(
    sizes: npt.NDArray[np.int32], boundaries: npt.NDArray[np.int64], examine_from: int
) -> npt.NDArray[np.bool_]:
    """Documents [D] of so many sentences or more, one of them too long."""
    long = boundaries[0] + np.flatnonzero(sizes[boundaries[0] : boundaries[-1]] > LONGEST_SENTENCE)
    has_long = np.diff(np.searchsorted(long, boundaries)) > 0
    return has_long & (np.diff(boundaries) >= examine_from)


def _tell_left_out(
    indexed: IndexedDataset, boundaries: npt.NDArray[np.int64], *, examine_from: int
) -> None:
    """Warn of documents that are in no sample because of a long sentence, if they are many."""
    left_out = _left_out(indexed.sizes, boundaries, examine_from)
    if not left_out.any():
        return
    tokens = np.diff(_running_total(indexed.sizes, boundaries)[boundaries - boundaries[0]])
    share = tokens[left_out].sum() / tokens.sum()
    if share < _TOLD_FROM:
        return
    warnings.warn(
        f"{indexed.prefix}: {np.count_nonzero(left_out):,} of {len(left_out):,} documents, with "
        f"{100 * share:.1f} % of the tokens, are left out, as in Megatron, since they have a "
        f"sentence of more than {LONGEST_SENTENCE} tokens",
        RuntimeWarning,
        stacklevel=2,
    )


def _running_total(
    sizes: npt.NDArray[np.int32], boundaries: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Tokens of these documents before each of their sentences, and at the end of them all."""
    used = sizes[boundaries[0] : boundaries[-1]]
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(used, dtype=np.int64)))


def _targets(max_length: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    """The endless target lengths, one 32-bit Mersenne Twister output each."""
    if not 0 <= short_seq_prob <= 1:
        raise ValueError(f"short_seq_prob must lie between 0 and 1, got {short_seq_prob}")
    if max_length < 2:
        raise ValueError(
            f"samples are too short: {max_length} tokens besides the special ones, expected at "
            "least 2; raise the sequence length"
        )
    if short_seq_prob == 0:
        return repeat(max_length)
    ratio = math.floor(min(1 / short_seq_prob, 2**32 - 1) + 0.5)  # words have 32 bits
    rng = np.random.RandomState(seed)

    def chunks() -> Iterator[list[int]]:
        while True:
            words = rng.randint(0, 2**32, 1 << 14, dtype=np.uint32)
            short = 2 + words % np.uint32(max_length - 1)
            yield np.where(words % np.uint32(ratio) == 0, short, max_length).tolist()

    return chain.from_iterable(chunks())


def _walk(
    firsts: npt.NDArray[np.int64],
    lasts: npt.NDArray[np.int64],
    totals: npt.NDArray[np.int64],
    min_sentences: int,
    draw: Callable[[], int],
) -> npt.NDArray[np.int64]:
    """Samples of some documents: first sentence, end, target length; [n, 3].

    Every target depends on how many were drawn before, so this goes sample by sample. It does not
    go sentence by sentence: where a sample ends is looked up in the running total of tokens.

    Args:
        firsts, lasts: the documents' sentences, counted as in ``totals``.
    """
    low = int(firsts[0])
    running = array("q", totals[low : int(lasts[-1]) + 1].tobytes())
    rows = array("q")
    for start, last in zip((firsts - low).tolist(), (lasts - low).tolist(), strict=True):
        whole = running[last]
        while True:
            target = draw()
            goal = running[start] + target
            end = last
            if goal <= whole:
                reached = bisect_left(running, goal, start + 1, last)
                end = max(reached, start + min_sentences)
                if last - end <= 1:
                    end = last
            rows.extend((start, end, target))
            if end == last:
                break
            start = end
        draw()  # Megatron draws for a sample that would follow the last one
    samples = np.frombuffer(rows, dtype=np.int64).reshape(-1, 3)
    return samples + np.array([low, low, 0])


def _digest(indexed: IndexedDataset, boundaries: npt.NDArray[np.int64]) -> str:
    return digest(indexed.sizes[boundaries[0] : boundaries[-1]], boundaries)
