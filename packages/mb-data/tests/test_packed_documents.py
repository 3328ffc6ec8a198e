"""Best-fit packing against the rule placed piece by piece."""

from itertools import pairwise

import numpy as np
import pytest
from mb_data import (
    IndexedDataset,
    IndexedDatasetBuilder,
    PackedDataset,
    build_packed_datasets,
)
from mb_data.samples.packed_documents import best_fit

EOD = 999


def one_by_one(lengths, room):
    """The room left in each bin, sorted: which of equal bins takes a piece does not matter."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, left in enumerate(free) if left >= length]
        if fitting:
            best = min(fitting, key=lambda i: free[i])
            free[best] -= length
        else:
            free.append(room - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(60))
def test_best_fit_is_the_rule(seed):
    rng = np.random.default_rng(seed)
    room = int(rng.integers(1, 40))
    lengths = rng.integers(1, room + 1, size=int(rng.integers(1, 200)))
    if seed % 3 == 0:
        lengths = np.minimum(lengths, 1 + room // 3)
    bins = best_fit(lengths, room)
    used = np.bincount(bins, weights=lengths).astype(int)
    assert sorted((room - used).tolist()) == one_by_one(lengths.tolist(), room)


@pytest.fixture
def prefix(tmp_path):
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        for size in [0, 1, 2, 9, 10, 11, 40, *rng.integers(0, 30, size=80).tolist()]:
            builder.add_document([*range(1, size), EOD][-size or 1 :] if size else [])
    return tmp_path / "a"


def test_every_token_is_predicted_once_an_epoch(prefix):
    indexed = IndexedDataset(prefix)
    documents = range(2, len(indexed))
    dataset = PackedDataset(indexed, documents, seq_length=9, num_samples=10_000, eod=EOD, seed=1)
    epoch = len(dataset.starts) - 1
    assert len(dataset) == 10_000
    covered = {d: np.zeros(int(indexed.sizes[d]), dtype=int) for d in documents}
    for sequence, first, length in dataset.pieces.tolist():
        assert 1 <= length <= 10
        covered[sequence][first + (first > 0) : first + length] += 1
    places = dataset.pieces[:, :2].tolist()
    for start, end in pairwise(dataset.starts.tolist()):
        assert places[start:end] == sorted(places[start:end])
    assert all((seen == 1).all() for seen in covered.values())

    def content(i):
        return tuple(dataset[i].tolist())

    first = [content(i) for i in range(epoch)]
    second = [content(i) for i in range(epoch, 2 * epoch)]
    assert sorted(first) == sorted(second)
    assert first != second
    assert content(-1) == content(len(dataset) - 1)
    used = dataset.pieces[:, 2].sum()
    assert sum(row.count(EOD) for row in first) >= epoch * 10 - used


def test_build_packed_datasets(prefix, reads_pages_one_by_one):
    options = {"seq_length": 9, "eod": EOD, "seed": 1, "num_samples": (5, 2, 0)}
    train, valid, test = build_packed_datasets(str(prefix), split="80,20,0", **options)
    assert test is None
    assert train.pieces[:, 0].max() < valid.pieces[:, 0].min()
    assert reads_pages_one_by_one(train)
    with pytest.raises(ValueError, match="seq_length of at least 1"):
        build_packed_datasets(str(prefix), split="1", **(options | {"seq_length": 0}))
    options |= {"num_samples": 1, "seq_length": np.int64(9)}
    narrow = PackedDataset(train.indexed, range(9), vocab_size=EOD, **options)
    with pytest.raises(ValueError, match="holds token 999, the vocabulary has ids 0 to 998"):
        list(narrow)
    with pytest.raises(ValueError, match="seed must lie between 0"):
        PackedDataset(train.indexed, range(9), **(options | {"seed": -1}))
    with pytest.raises(IndexError, match=f"sample {len(narrow)} of {len(narrow)}"):
        narrow[len(narrow)]
    for documents in (range(10**6), range(0, 9, 2), range(0)):
        with pytest.raises(ValueError, match="is no part of its"):
            PackedDataset(train.indexed, documents, **options)
