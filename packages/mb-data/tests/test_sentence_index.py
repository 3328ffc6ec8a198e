"""Sentences to samples and blocks: the vectorised builders against the plain loops."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from mb_data import mersenne
from mb_data.samples import reference, sentence_index
from mb_data.samples.sentence_index import (
    block_mapping,
    build_block_mapping,
    build_sample_mapping,
    sample_mapping,
)
from sentence_helpers import write


def corpus(rng):
    """Random sentence lengths with empty, long and missing ones, from a document on."""
    counts = rng.integers(0, 12, int(rng.integers(1, 30)))
    sizes = rng.integers(0, 60, int(counts.sum())).astype(np.int32)
    sizes[rng.random(len(sizes)) < 0.02] = 600
    boundaries = np.concatenate(([0], np.cumsum(counts)))
    return sizes, boundaries[int(rng.integers(0, len(counts))) :]


def shuffled(rows, seed):
    return [list(rows[i]) for i in mersenne.permutation(len(rows), seed + 1)]


@pytest.mark.parametrize("block", [7, 1 << 16])
def test_samples_equal_the_loop(monkeypatch, block):
    monkeypatch.setattr(sentence_index, "BLOCK", block)
    rng = np.random.default_rng(block)
    compared = 0
    for _ in range(300):
        sizes, boundaries = corpus(rng)
        short, ratio = [(0.0, 0), (0.1, 10), (0.4, 3), (1.0, 1)][int(rng.integers(0, 4))]
        settings = {
            "max_length": int(rng.integers(2, 150)),
            "min_sentences": int(rng.integers(1, 3)),
            "num_samples": int(rng.integers(0, 60)),
        }
        seed = int(rng.integers(0, 1000))
        words = iter(np.random.RandomState(seed).randint(0, 2**32, 10**4, np.uint32).tolist())
        try:
            got = build_sample_mapping(
                sizes, boundaries, short_seq_prob=short, seed=seed, **settings
            )
        except ValueError:  # no document is fit; the count below bounds how often
            continue
        want = reference.sample_mapping(
            sizes.tolist(),
            boundaries.tolist(),
            draw=words.__next__ if ratio else None,
            short_ratio=ratio,
            **settings,
        )
        assert got.dtype == np.uint32
        assert got.tolist() == shuffled(want, seed)
        compared += 1
    assert compared > 250


def test_blocks_equal_the_loop():
    rng = np.random.default_rng(5)
    compared = 0
    for _ in range(300):
        sizes, boundaries = corpus(rng)
        titles = rng.integers(0, 40, len(boundaries) - 1).astype(np.int32)
        settings = {
            "max_length": int(rng.integers(2, 150)),
            "min_sentences": int(rng.integers(1, 3)),
            "num_samples": int(rng.integers(0, 60)),
        }
        seed = int(rng.integers(0, 1000))
        try:
            got = build_block_mapping(sizes, boundaries, titles, seed=seed, **settings)
        except ValueError:  # no document is fit; the count below bounds how often
            continue
        want = reference.block_mapping(
            sizes.tolist(), boundaries.tolist(), titles.tolist(), **settings
        )
        assert got.tolist() == shuffled(want, seed)
        compared += 1
    assert compared > 250


def test_long_sentences_exclude_a_document_unless_it_is_all_there_is():
    sizes = np.array([513, 9, 512, 513], np.int32)
    boundaries = np.array([0, 1, 3, 4])
    settings = {"max_length": 50, "num_samples": 0, "seed": 1}
    t5 = build_sample_mapping(sizes, boundaries, min_sentences=1, short_seq_prob=0, **settings)
    assert sorted(t5[:, 0].tolist()) == [0, 1, 3]
    bert = build_sample_mapping(sizes, boundaries, min_sentences=2, short_seq_prob=0, **settings)
    assert bert.tolist() == [[1, 3, 50]]
    ict = build_block_mapping(sizes, boundaries, np.zeros(3, np.int32), min_sentences=1, **settings)
    assert ict.tolist() == [[1, 3, 1, 0]]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        # Of those before the last two, which are in another part of the split.
        ("bert", r"d: 1 of 4 documents, with 57\.0 % of the tokens, are left out"),
        ("t5", r"d: 1 of 4 documents, with 57\.0 % of the tokens, are left out"),
        ("ict", r"d: 2 of 4 documents, with 98\.3 % of the tokens, are left out"),
    ],
)
def test_documents_with_a_long_sentence_are_told_of(tmp_path, kind, said):
    """T5 takes one that is a document by itself."""
    sizes = [[9, 9], [513, 200], [513, 200], [4, 3]]
    if kind != "ict":
        sizes[2] = [513]
    sizes += [[600, 600], [500] * 300]
    documents = [[[21] * size for size in document] for document in sizes]
    indexed = write(tmp_path / "d", documents)
    settings = {"max_length": 50, "num_samples": 0, "seed": 1, "cache_dir": None}

    def mapping(parts):
        if kind == "ict":
            titles = np.zeros(len(parts), np.int32)
            return block_mapping(indexed, parts, titles, min_sentences=2, **settings)
        least = 2 if kind == "bert" else 1
        return sample_mapping(indexed, parts, min_sentences=least, short_seq_prob=0, **settings)

    with pytest.warns(RuntimeWarning, match=said):
        mapping(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapping(range(4, 6))  # where 0.8 % are


@pytest.mark.parametrize("share", [2**-32, 1e-12, 5e-324])
def test_a_share_that_32_bits_do_not_tell_from_none(share):
    """Of a sample so seldom shortened that none of these is."""
    sizes, boundaries = np.full(40, 5, np.int32), np.array([0, 20, 40])
    settings = {"max_length": 12, "min_sentences": 2, "num_samples": 9, "seed": 1}
    none, few = (
        build_sample_mapping(sizes, boundaries, short_seq_prob=p, **settings) for p in (0, share)
    )
    assert few.tolist() == none.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_sentences": 3}, "none of 1 documents has 3 sentences or more.*--split-sentences"),
        ({"short_seq_prob": 1.5}, "short_seq_prob must lie between 0 and 1"),
        ({"short_seq_prob": -0.1}, "short_seq_prob must lie between 0 and 1"),
        ({"max_length": 1}, "samples are too short: 1 tokens .* at least 2"),
    ],
)
def test_bad_arguments(change, message):
    settings = {
        "max_length": 9,
        "short_seq_prob": 0.1,
        "min_sentences": 2,
        "num_samples": 1,
        "seed": 1,
    } | change
    with pytest.raises(ValueError, match=message):
        build_sample_mapping(np.array([5, 5], np.int32), np.array([0, 2]), **settings)


class TestMersenne:
    def test_ten_thousandth_number(self):
        # The C++ standard states it, for the default seed: [rand.predef].
        chunks = mersenne.outputs(5489)
        numbers = np.concatenate([next(chunks) for _ in range(33)])
        assert numbers[9999] == 9981545732273789042
        # One number does not show every bit of the masks: what C++'s std::mt19937_64 adds up to.
        assert numbers[:10_000].sum() == 7_590_819_175_830_597_705

    @pytest.mark.parametrize("n", [0, 1, 2, 311, 312, 313, 1000])
    def test_permutation_is_the_plain_loop(self, n):
        chunks = mersenne.outputs(3)
        numbers = np.concatenate([next(chunks) for _ in range(4)]).tolist()
        order = list(range(n))
        for drawn, i in enumerate(range(n - 1, 0, -1)):
            j = numbers[drawn] % (i + 1)
            order[i], order[j] = order[j], order[i]
        assert mersenne.permutation(n, 3).tolist() == order
