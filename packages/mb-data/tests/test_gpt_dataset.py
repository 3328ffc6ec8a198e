"""GPT samples: Megatron's split, order and packing, compared with the sequential builder."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples import gpt, reference, split
from mb_data.samples.gpt import (
    GPTDataset,
    build_gpt_datasets,
    build_index,
    build_sample_idx,
    count_epochs,
    shuffled_epochs,
)
from mb_data.samples.split import parse_split


def write(prefix, sizes, dtype=np.uint16) -> IndexedDataset:
    """Documents of the given sizes whose tokens count up through the whole file."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        start = 0
        for size in sizes:
            builder.add_document(np.arange(start, start + size))
            start += size
    return IndexedDataset(prefix)


def test_fractions_are_no_tokens(tmp_path):
    write(tmp_path / "d", [9, 9], np.float32)
    with pytest.raises(ValueError, match=r"holds numbers of float32, which are no tokens"):
        build_gpt_datasets(
            str(tmp_path / "d"), seq_length=4, seed=1, split="1", num_samples=(1, None, None)
        )


@pytest.mark.parametrize(
    ("split", "n", "lengths"),
    [
        ("949,50,1", 10, (9, 1, 0)),
        ("949,50,1", 1000, (949, 50, 1)),
        ("90,10", 101, (91, 10, 0)),
        ("1,1,1", 10, (3, 4, 3)),
        ("1,1,1", 1, (0, 1, 0)),
        ("0.5,0.25,0.25", 2, (1, 1, 0)),
        ("1,1,1", 0, (0, 0, 0)),
    ],
)
def test_split_of_megatron_core_rounds_the_running_sums(split, n, lengths):
    parts = parse_split(split, n, rounding="cumulative")
    assert tuple(map(len, parts)) == lengths
    assert [*parts[0], *parts[1], *parts[2]] == list(range(n))
    with pytest.raises(ValueError, match="expected shares or cumulative"):
        parse_split(split, n, rounding="core")


@pytest.mark.parametrize(
    ("split", "n", "lengths"),
    [
        ("949,50,1", 10, (10, 0, 0)),
        ("949,50,1", 1000, (949, 50, 1)),
        ("969, 30, 1", 1000, (969, 30, 1)),
        ("969/30/1", 5000, (4845, 150, 5)),
        ("90,10", 101, (91, 10, 0)),
        ("1", 7, (7, 0, 0)),
        ("100,0,0", 3, (3, 0, 0)),
        ("1,1,1", 10, (4, 3, 3)),
        ("0.5,0.25,0.25", 2, (2, 0, 0)),
        ("1,1,1", 0, (0, 0, 0)),
    ],
)
def test_split_rounds_and_train_absorbs_the_residue(split, n, lengths):
    train, valid, test = parse_split(split, n)
    assert (len(train), len(valid), len(test)) == lengths
    assert [*train, *valid, *test] == list(range(n))


def test_split_is_read_without_the_quotation_marks_of_a_shell():
    for typed in ("'99,1,0'", '"99,1,0"', "'99/1/0'"):
        assert parse_split(typed, 200) == parse_split("99,1,0", 200)


def test_a_split_does_not_hang_on_the_python(monkeypatch):
    """Since 3.12 `sum` carries rounding errors along, nearly as `math.fsum`."""
    monkeypatch.setattr(split, "sum", math.fsum, raising=False)
    assert parse_split("0.01,0.29,0.7", 15) == (range(1), range(1, 5), range(5, 15))


def test_split_keeps_the_quirks_of_the_rule():
    # Halves round to even, so nobody gets the document, and the shift gives it to train.
    assert parse_split("0,50,50", 1) == (range(0, 1), range(1, 1), range(1, 1))
    # Two halves round up, the shift is -1: train would be range(0, -1).
    assert parse_split("0,50,50", 3) == (range(0, 0), range(0, 1), range(1, 3))


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1", "1;2", "1,,1"]
)
def test_split_that_does_not_parse(split):
    with pytest.raises(ValueError, match="expected one to three shares"):
        parse_split(split, 10)


def test_sample_idx_equals_the_sequential_builder_on_random_cases():
    rng = np.random.default_rng(0)
    for case in range(2000):
        documents = int(rng.integers(1, 30))
        sizes = rng.integers(0, rng.integers(2, 40), documents).astype(np.int32)
        sizes[rng.random(documents) < 0.3] = 0
        sizes[rng.integers(0, documents)] += 1  # at least one token
        tokens = int(sizes.sum())
        epochs = int(rng.integers(1, 5))
        seq_length = int(rng.integers(1, 50))
        doc_idx = rng.permutation(np.tile(np.arange(documents, dtype=np.int32), epochs))
        n = (epochs * tokens - 1) // seq_length
        want = reference.build_sample_idx(sizes.tolist(), doc_idx.tolist(), seq_length, n)
        for block in (1, 7, 1 << 15) if case % 5 == 0 else (1 << 15,):
            got = build_sample_idx(sizes[doc_idx], seq_length, n, block=block)
            assert got.dtype == np.int32
            assert got.tolist() == [list(row) for row in want], (case, block)


def test_epochs_are_the_fewest_that_suffice():
    rng = np.random.default_rng(1)
    for _ in range(2000):
        tokens, seq_length, wanted = (int(rng.integers(1, 200)) for _ in range(3))
        epochs = 1
        while (epochs * tokens - 1) // seq_length < wanted:
            epochs += 1
        assert count_epochs(tokens, seq_length, wanted) == epochs
    assert count_epochs(5, 8, 0) == 1


# 5 documents of 7 tokens, S = 4: 8 samples an epoch. What Megatron-LM's own functions give for
# seed 1234: one epoch, and two of which the last is shuffled apart.
GOLDEN = [
    (8, [4, 0, 1, 2, 3], [2, 6, 7, 3, 5, 1, 0, 4]),
    (
        10,
        [4, 0, 1, 2, 3, 3, 2, 1, 0, 4],
        [6, 4, 0, 5, 3, 2, 7, 1, 15, 11, 13, 9, 12, 16, 8, 10, 14],
    ),
]


@pytest.mark.parametrize(("num_samples", "doc_idx", "shuffle_idx"), GOLDEN, ids=["1", "2-apart"])
def test_golden_order(num_samples, doc_idx, shuffle_idx):
    sizes = np.full(5, 7, np.int32)
    index = build_index(sizes, range(5), seq_length=4, num_samples=num_samples, seed=1234)
    assert index["doc_idx"].tolist() == doc_idx
    assert index["shuffle_idx"].tolist() == shuffle_idx
    assert index["doc_idx"].dtype == np.int32
    assert index["shuffle_idx"].dtype == np.uint32


def megatron_order(documents, epochs, apart, before, total, seed):
    """Megatron's two shuffles written down once more, from its description."""
    rng = np.random.RandomState(seed)
    parts = []
    for repeat in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(documents) * repeat, dtype=np.int32)
        rng.shuffle(part)
        parts += part.tolist()
    shuffled = []
    for first, last in [(0, before), (before, total)] if before < total else [(0, total)]:
        part = np.arange(first, last, dtype=np.uint32)
        rng.shuffle(part)
        shuffled += part.tolist()
    return parts, shuffled


@pytest.mark.parametrize(
    ("num_samples", "epochs", "apart"),
    [(26, 1, False), (27, 2, True), (45, 2, True), (46, 2, False), (52, 2, False), (53, 3, True)],
)
def test_last_epoch_is_shuffled_apart_below_80_percent(num_samples, epochs, apart):
    # 15 documents, 105 tokens, S = 4: 26 samples an epoch; 80 % of that is 20.8, cut to 20.
    documents = range(3, 18)
    sizes = np.full(20, 7, np.int32)
    index = build_index(sizes, documents, seq_length=4, num_samples=num_samples, seed=7)
    assert shuffled_epochs(105, 4, num_samples) == ([epochs - 1, 1] if apart else [epochs])
    total = (epochs * 105 - 1) // 4
    before = ((epochs - 1) * 105 - 1) // 4 if apart else total
    doc_idx, shuffle_idx = megatron_order(documents, epochs, apart, before, total, 7)
    assert index["doc_idx"].tolist() == doc_idx
    assert index["shuffle_idx"].tolist() == shuffle_idx
    if apart:
        assert sorted(index["doc_idx"][-15:].tolist()) == list(documents)
        assert sorted(index["shuffle_idx"][:before].tolist()) == list(range(before))


def test_items_are_the_shuffled_stream_cut_every_s_tokens(tmp_path):
    rng = np.random.default_rng(2)
    for case in range(60):
        sizes = rng.integers(0, 12, int(rng.integers(2, 12)))
        sizes[0] = max(sizes[0], 1)
        indexed = write(tmp_path / f"{case}", sizes)
        seq_length, wanted = int(rng.integers(1, 20)), int(rng.integers(0, 30))
        dataset = GPTDataset(
            indexed, range(len(sizes)), seq_length=seq_length, num_samples=wanted, seed=case
        )
        stream = np.concatenate([indexed[i] for i in dataset.doc_idx])
        assert len(stream) == dataset.num_epochs * sizes.sum()
        assert len(dataset) == (len(stream) - 1) // seq_length >= wanted
        for i in range(len(dataset)):
            start = int(dataset.shuffle_idx[i]) * seq_length
            item = dataset[i]
            assert item.dtype == np.int64
            assert item.tolist() == stream[start : start + seq_length + 1].tolist()


def test_build_gives_one_dataset_per_part(tmp_path):
    write(tmp_path / "d", [50] * 10)
    train, valid, test = build_gpt_datasets(
        tmp_path / "d", split="8,2,0", seq_length=9, num_samples=(100, 5, 5), seed=1
    )
    assert test is None
    assert (train.documents, valid.documents) == (range(8), range(8, 10))
    assert train.num_epochs == 3
    assert len(train) >= 100
    tokens = np.concatenate([valid[i] for i in range(len(valid))])
    assert tokens.min() >= 400
    assert train[-1].tolist() == train[len(train) - 1].tolist()
    with pytest.raises(IndexError, match=f"sample {len(train)} of {len(train)}"):
        train[len(train)]


def test_pickled_dataset_maps_the_same_files(tmp_path, reads_pages_one_by_one):
    indexed = write(tmp_path / "d", [300] * 200)
    dataset = GPTDataset(indexed, range(200), seq_length=16, num_samples=10_000, seed=1)
    frozen = pickle.dumps(dataset)
    assert len(frozen) < 1000
    twin = pickle.loads(frozen)
    assert all((twin[i] == dataset[i]).all() for i in range(0, len(dataset), 997))
    assert reads_pages_one_by_one(twin)


def test_pickled_in_one_folder_read_in_another(tmp_path, monkeypatch):
    """Where files of the same names may be."""
    for folder, first in (("a", 10), ("b", 30)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "d", [first, 40])
    monkeypatch.chdir(tmp_path / "a")
    indexed = IndexedDataset("d")
    dataset = GPTDataset(indexed, range(2), seq_length=4, num_samples=8, seed=1)
    want, frozen = dataset[0].tolist(), pickle.dumps((indexed, dataset))
    monkeypatch.chdir(tmp_path / "b")
    there, twin = pickle.loads(frozen)
    assert there.sizes.tolist() == [10, 40]
    assert twin[0].tolist() == want


class TestBadInput:
    def test_no_tokens(self, tmp_path):
        write(tmp_path / "d", [5, 0, 0])
        with pytest.raises(ValueError, match=r"documents 1 to 1 hold no tokens; .* more text"):
            build_gpt_datasets(
                tmp_path / "d", split="1,1,1", seq_length=4, num_samples=(1, 1, 1), seed=1
            )

    def test_no_documents(self, tmp_path):
        write(tmp_path / "d", [])
        assert build_gpt_datasets(
            tmp_path / "d", split="1", seq_length=4, num_samples=(1, 0, 0), seed=1
        ) == (None, None, None)

    def test_fewer_tokens_than_one_sample_repeat(self, tmp_path):
        indexed = write(tmp_path / "d", [3])
        dataset = GPTDataset(indexed, range(1), seq_length=7, num_samples=2, seed=1)
        assert dataset.num_epochs == 5
        assert dataset[0].tolist() in ([0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 0, 1, 2])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"seq_length": 0}, "seq_length of at least 1"),
            ({"num_samples": (1, -1, 0)}, "num_samples of at least 0"),
            ({"num_samples": (1, 1)}, "expected three numbers"),
            ({"num_samples": 300}, "expected three numbers"),
            ({"seed": -1}, "seed must lie between"),
            ({"seed": 2**32}, "seed must lie between"),
            ({"split": "x"}, "expected one to three shares"),
        ],
    )
    def test_arguments(self, tmp_path, change, message):
        write(tmp_path / "d", [9] * 9)
        arguments = {"split": "1,1,1", "seq_length": 4, "num_samples": (1, 1, 1), "seed": 1}
        with pytest.raises(ValueError, match=message):
            build_gpt_datasets(tmp_path / "d", **(arguments | change))
        with pytest.raises(ValueError, match="is no part of its 9 documents"):
            GPTDataset(
                IndexedDataset(tmp_path / "d"), range(5, 10), seq_length=1, num_samples=1, seed=1
            )

    def test_missing_and_truncated_files(self, tmp_path):
        arguments = {"split": "1", "seq_length": 4, "num_samples": (1, 0, 0), "seed": 1}
        with pytest.raises(FileNotFoundError, match=r"d\.idx"):
            build_gpt_datasets(tmp_path / "d", **arguments)
        write(tmp_path / "d", [9] * 9)
        content = (tmp_path / "d.bin").read_bytes()
        (tmp_path / "d.bin").write_bytes(content[:-2])
        with pytest.raises(ValueError, match=r"d\.bin.*its index needs"):
            build_gpt_datasets(tmp_path / "d", **arguments)
        assert not (tmp_path / "d_index").exists()


def test_more_passes_than_memory_holds_are_told_of(tmp_path, monkeypatch):
    def full(*_, **__):
        raise MemoryError("Unable to allocate 335. GiB")

    monkeypatch.setattr(gpt, "build_index", full)
    with pytest.raises(MemoryError, match="a: 900 samples are 451 times these 2 documents, an"):
        GPTDataset(write(tmp_path / "a", [2, 2]), range(2), seq_length=2, num_samples=900, seed=1)


def test_sentences_that_are_taken_for_documents_are_told_of(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        builder.add_document([1, 2, 3, 4], [2, 2])
    how = {"seq_length": 2, "num_samples": 1, "seed": 1}
    with pytest.warns(RuntimeWarning, match="a: its documents are of several sequences"):
        dataset = GPTDataset(IndexedDataset(tmp_path / "a"), range(2), **how)
    assert sorted(dataset.doc_idx.tolist()) == [0, 1]


def test_a_token_beyond_the_vocabulary_is_an_error(tmp_path):
    """Not an index error, or a fault of the device, somewhere in the model."""
    with IndexedDatasetBuilder(tmp_path / "a", "i4") as builder:
        builder.add_document([1, 2, 50_300, 3, 4, 5, 6, 7])
    options = {"split": "1", "seq_length": 7, "num_samples": (1, 0, 0), "seed": 0}
    train, _, _ = build_gpt_datasets(str(tmp_path / "a"), vocab_size=50_257, **options)
    with pytest.raises(ValueError, match=r"holds token 50300, the vocabulary has ids 0 to 50,256"):
        _ = train[0]
    train, _, _ = build_gpt_datasets(str(tmp_path / "a"), vocab_size=50_304, **options)
    assert train[0].max() == 50_300
