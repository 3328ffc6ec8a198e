"""Best-fit packing against the rule placed piece by piece; fill-in-the-middle by its marks."""

import numpy as np
import pytest
from mb_data import (
    FillInTheMiddle,
    IndexedDataset,
    IndexedDatasetBuilder,
    MiddleTokens,
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
    for documents in (range(10**6), range(0, 9, 2), range(0)):
        with pytest.raises(ValueError, match="is no part of its"):
            PackedDataset(train.indexed, documents, **options)


MARKS = MiddleTokens(prefix=1001, middle=1002, suffix=1003)


def undo(text):
    """The document that a rearranged one was, None if it was cut off."""
    prefix, middle, suffix = (text.index(mark) if mark in text else -1 for mark in MARKS)
    if prefix < 0:
        return text
    if min(middle, suffix) < 0:
        return None
    if suffix == prefix + 1:  # suffix first
        return text[middle + 1 :] + text[suffix + 1 : middle]
    return text[1:suffix] + text[middle + 1 :] + text[suffix + 1 : middle]


def test_fill_in_the_middle_loses_nothing():
    rng = np.random.default_rng(0)
    samples = [rng.integers(1, 900, size=200) for _ in range(50)]
    for sample in samples:
        sample[rng.integers(0, 200, size=6)] = EOD
    everything = FillInTheMiddle(samples, MARKS, eod=EOD, rate=1.0, suffix_first_rate=0.0, seed=3)
    for i, sample in enumerate(samples):
        changed = everything[i].tolist()
        assert len(changed) == len(sample)
        assert changed == everything[i].tolist()  # a function of index and seed
        before = " ".join(map(str, sample.tolist())).split(f"{EOD}")
        after = " ".join(map(str, changed)).split(f"{EOD}")
        for old, new in zip(before[:3], after[:3], strict=True):  # the last ones may be cut off
            if new.split():
                assert list(map(str, undo(list(map(int, new.split()))))) == old.split()
    nothing = FillInTheMiddle(samples, MARKS, eod=EOD, rate=0.0, seed=3)
    assert all((nothing[i] == sample).all() for i, sample in enumerate(samples))
    swapped = FillInTheMiddle(samples, MARKS, eod=EOD, rate=1.0, suffix_first_rate=1.0, seed=3)
    first = swapped[0].tolist()
    assert first[first.index(1001) + 1] == 1003
    half = FillInTheMiddle(samples, MARKS, eod=EOD, seed=3)
    share = sum((half[i] == 1001).sum() for i in range(50)) / sum(
        (everything[i] == 1001).sum() for i in range(50)
    )
    assert 0.35 < share < 0.65


def test_fill_in_the_middle_of_fragments():
    """A repository's files are rearranged each by itself; what `leave` holds for is not."""
    rng = np.random.default_rng(1)
    documents = [  # of fragments of 0 to 39 tokens; fragments that begin with 7 are to be left
        [[*([7] * (rng.random() < 0.3)), *rng.integers(10, 900, rng.integers(0, 40)).tolist()]
         for _ in range(rng.integers(1, 6))]
        for _ in range(60)
    ]  # fmt: skip
    joined = [[t for f in fragments for t in (*f, 1004)][:-1] for fragments in documents]
    samples = [np.array([*text, EOD] + [EOD] * 60) for text in joined]
    options = {"eod": EOD, "fragment_end": 1004, "leave": lambda text: text[0] == 7, "seed": 5}
    changed = FillInTheMiddle(samples, MARKS, rate=1.0, fragment_rate=1.0, **options)
    for i, fragments in enumerate(documents):
        text = changed[i].tolist()
        found = [[]]
        for token in text[: text.index(EOD)]:
            if token == 1004:
                found.append([])
            else:
                found[-1].append(token)
        for old, new in zip(fragments, found, strict=True):
            if not old or old[0] == 7:
                assert new == old
            else:
                assert new != old
                assert undo(new) == old
    counts = {}
    for rates in ((0.5, 1.0), (1.0, 0.5), (0.0, 1.0)):
        some = FillInTheMiddle(samples, MARKS, rate=rates[0], fragment_rate=rates[1], **options)
        counts[rates] = sum((some[i] == 1001).sum() for i in range(60))
    whole = sum((changed[i] == 1001).sum() for i in range(60))
    assert 0.3 < counts[0.5, 1.0] / whole < 0.7
    # Half of the fragments, and those documents whole that have one alone.
    alone = sum(len(f) == 1 and len(f[0]) > 0 and f[0][0] != 7 for f in documents)
    assert 0.3 < (counts[1.0, 0.5] - alone) / (whole - alone) < 0.7
    assert counts[0.0, 1.0] == 0


def test_fill_in_the_middle_refuses():
    with pytest.raises(ValueError, match="rate must lie between 0 and 1"):
        FillInTheMiddle([], MARKS, eod=EOD, rate=2, seed=0)
    with pytest.raises(ValueError, match="different tokens"):
        FillInTheMiddle([], MARKS, eod=1001, seed=0)
    with pytest.raises(ValueError, match="different tokens"):
        FillInTheMiddle([], MARKS, eod=EOD, fragment_end=EOD, seed=0)
    with pytest.raises(ValueError, match="fragment_rate must lie"):
        FillInTheMiddle([], MARKS, eod=EOD, fragment_rate=-1, seed=0)
    with pytest.raises(ValueError, match=r"seed must lie between 0 .* got -1"):
        FillInTheMiddle([], MARKS, eod=EOD, seed=-1)
