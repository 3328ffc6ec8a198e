"""Bytes of the format, written and checked by two independent pieces of code; damaged files."""

import errno
import multiprocessing
import os
import pickle
import random
import stat
import struct
from functools import partial

import mb_data.dataset_builder
import numpy as np
import pytest
from mb_data import IndexedDataset, IndexedDatasetBuilder
from mb_data.dataset_builder import write_index
from mb_data.indexed_dataset import best_dtype
from mb_data.samples.index_cache import read_index_file

DOCUMENTS = [[[5, 0, 7]], [[]], [[1], [2, 3], [4]], [], [[100, 101, 102, 103, 104]]]
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}
LETTERS = {"u1": "B", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "f8": "d", "f4": "f", "u2": "H"}


def build(prefix, dtype="u2", documents=DOCUMENTS):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sentences in documents:
            builder.add_document(
                np.array([t for s in sentences for t in s], dtype=dtype),
                [len(s) for s in sentences],
            )


def golden(dtype, documents=DOCUMENTS):
    """Both files, from the layout table, with struct alone."""
    item = struct.calcsize("<" + LETTERS[dtype])
    sentences = [s for d in documents for s in d]
    tokens = [t for s in sentences for t in s]
    data = struct.pack(f"<{len(tokens)}{LETTERS[dtype]}", *tokens)
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sentences)) + struct.pack("<Q", len(documents) + 1)
    for s in sentences:
        index += struct.pack("<i", len(s))
    address = 0
    for s in sentences:
        index += struct.pack("<q", address)
        address += len(s) * item
    count = 0
    index += struct.pack("<q", 0)
    for d in documents:
        count += len(d)
        index += struct.pack("<q", count)
    return data, index


@pytest.mark.parametrize("piece", [1, 2, 1 << 20])
@pytest.mark.parametrize("dtype", CODES)
def test_bytes_equal_the_layout_table(tmp_path, monkeypatch, dtype, piece):
    monkeypatch.setattr(mb_data.dataset_builder, "PIECE", piece)
    build(tmp_path / "a", dtype)
    data, index = golden(dtype)
    assert (tmp_path / "a.bin").read_bytes() == data
    assert (tmp_path / "a.idx").read_bytes() == index
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_tokens_that_cannot_be_replaced_keep_the_old_dataset(tmp_path, monkeypatch):
    def replace(source, target, replace=os.replace):
        if str(target).endswith(".bin"):
            raise PermissionError(13, "it is open elsewhere", str(target))
        replace(source, target)

    build(tmp_path / "a")
    before = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    monkeypatch.setattr(mb_data.dataset_builder.os, "replace", replace)
    for name in ("a", "new"):
        with (
            pytest.raises(PermissionError, match="open elsewhere"),
            IndexedDatasetBuilder(tmp_path / name, "u2") as builder,
        ):
            builder.add_document([1])
    assert before == ((tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes())
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
    monkeypatch.undo()
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        builder.add_document([1])
    assert IndexedDataset(tmp_path / "a")[:][0].tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("dtype", CODES)
def test_reads_back(tmp_path, dtype):
    build(tmp_path / "a", dtype)
    dataset = IndexedDataset(tmp_path / "a")
    sentences = [s for d in DOCUMENTS for s in d]
    assert len(dataset) == len(sentences)
    assert [list(x) for x in dataset[:]] == [list(x) for x in dataset] == sentences
    assert dataset.sizes.tolist() == [len(s) for s in sentences]
    assert dataset.sizes.dtype == np.int32
    assert dataset.document_indices.tolist() == [0, 1, 2, 5, 5, 6]
    assert dataset.document_indices.dtype == np.int64
    assert dataset.num_documents == len(DOCUMENTS)
    assert dataset[-1].dtype == np.dtype(dtype)


def test_more_than_four_gigabytes(tmp_path):
    """Longest sequence and addresses beyond 32 bits; the file has holes, so it needs no disk."""
    sizes = [2**31 - 1, 3, 0, 2**31 - 1, 2]
    starts = [sum(sizes[:i]) * 2 for i in range(len(sizes))]
    index = struct.pack("<9sQBQQ5i5q4q", b"MMIDIDX", 1, 8, 5, 4, *sizes, *starts, 0, 2, 4, 5)
    with open(tmp_path / "a.idx", "wb") as file:
        write_index(file, np.dtype("<u2"), np.array(sizes, "i4"), np.array([2, 2, 1], "i4"))
    assert (tmp_path / "a.idx").read_bytes() == index
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(2 * sum(sizes))
        for start, tokens in ((starts[1], (1, 2, 3)), (starts[4] - 2, (4, 5, 6))):
            file.seek(start)
            file.write(struct.pack("<3H", *tokens))
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset[i].tolist() for i in (1, 2, 4)] == [[1, 2, 3], [], [5, 6]]
    assert dataset.get(3, 2**31 - 3).tolist() == [0, 4]
    assert [*dataset.document(2)] == [4]


def test_code_7_is_float32_in_megatron_core_and_was_float64_before(tmp_path):
    for dtype in ("f8", "f4"):
        build(tmp_path / "a", dtype)
        raw = bytearray((tmp_path / "a.idx").read_bytes())
        raw[17] = 7
        (tmp_path / "a.idx").write_bytes(raw)
        dataset = IndexedDataset(tmp_path / "a")
        assert dataset.dtype == np.dtype(dtype)
        assert dataset[0].tolist() == [5.0, 0.0, 7.0]


def test_modes_of_a_multimodal_dataset(tmp_path):
    """Megatron Core writes one int8 a sequence behind the document boundaries."""
    with IndexedDatasetBuilder(tmp_path / "a", "i4") as builder:
        builder.add_document([1, 2, 3], [2, 1], modes=[0, 1])
        builder.add_documents(np.array([4, 5]), [1, 1], modes=[1, 0])
    assert (tmp_path / "a.idx").read_bytes()[-4:] == b"\0\1\1\0"
    assert IndexedDataset(tmp_path / "a").modes.tolist() == [0, 1, 1, 0]
    build(tmp_path / "plain", "i4")
    assert IndexedDataset(tmp_path / "plain").modes is None
    with (
        pytest.raises(ValueError, match=r"expected 1 modes, one a sequence, got \(2,\)"),
        IndexedDatasetBuilder(tmp_path / "b", "i4") as builder,
    ):
        builder.add_document([1], modes=[0, 1])
    builder = IndexedDatasetBuilder(tmp_path / "b", "i4")
    builder.add_document([1])
    with pytest.raises(ValueError, match="modes with all sequences or with none"):
        builder.add_document([1], modes=[0])
    builder.discard()
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "plain.bin", "plain.idx"]


def test_an_index_that_claims_more_than_there_is(tmp_path):
    """142 bytes, each of ten sequences all the rest of memory: datasets would reserve it."""
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        for _ in range(4):
            builder.add_document([1, 2])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<3i", raw, 34, 2**31 - 1, 2**31 - 1, 2**31 - 1)
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.bin: 16 bytes, but its index needs 12,884,901,886"):
        IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(("entry", "value"), [(2, 0), (2, -1), (4, 7)])
def test_documents_that_are_no_ranges_of_sequences(tmp_path, entry, value):
    build(tmp_path / "a")
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", raw, 34 + 12 * 6 + 8 * entry, value)
    (tmp_path / "a.idx").write_bytes(raw)
    dataset = IndexedDataset(tmp_path / "a")
    for read in (dataset.boundaries(range(1)).tolist, partial(dataset.document, 0)):
        assert [*read()] in ([0, 1], [0])
    for read in (
        partial(dataset.boundaries, range(dataset.num_documents)),
        partial(dataset.document, entry - 1),
    ):
        with pytest.raises(ValueError, match=rf"damaged: document {entry - 1} runs from sequence"):
            read()


def test_mutated_files_are_refused_or_their_errors_name_the_file(tmp_path):
    rng = random.Random(0)
    build(tmp_path / "whole", "u2")
    whole = {end: (tmp_path / f"whole.{end}").read_bytes() for end in ("bin", "idx")}
    opened = 0
    for _ in range(400):
        data = {end: bytearray(raw) for end, raw in whole.items()}
        end = rng.choice(["idx", "idx", "idx", "bin"])
        for _ in range(rng.randrange(1, 4)):
            data[end][rng.randrange(34 if end == "idx" else 0, len(data[end]))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[end][rng.randrange(len(data[end])) :]
        for suffix, raw in data.items():
            (tmp_path / f"a.{suffix}").write_bytes(raw)
        problems = []
        try:
            dataset = IndexedDataset(tmp_path / "a")
        except ValueError as error:
            problems.append(error)
        else:
            opened += 1
            everything = range(dataset.num_documents)
            calls = [partial(dataset.get, i) for i in range(len(dataset))]
            calls += [partial(dataset.document, i) for i in everything]
            for call in [*calls, partial(dataset.boundaries, everything)]:
                try:
                    call()
                except ValueError as error:
                    problems.append(error)
        assert all(str(tmp_path / "a.") in str(problem) for problem in problems)
    assert opened > 50


def test_get_and_slices(tmp_path):
    build(tmp_path / "a")
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.get(5, 2, 2).tolist() == [102, 103]
    assert dataset.get(-1, 4).tolist() == [104]
    assert dataset.get(5, 5).tolist() == []
    assert [x.tolist() for x in dataset[4:1:-2]] == [[4], [1]]
    assert not dataset[0].flags.writeable
    with pytest.raises(IndexError, match="sequence 6 of 6"):
        dataset[6]
    for offset, length in [(-1, 2), (0, 6), (6, None), (3, 3)]:
        with pytest.raises(ValueError, match="has 5 tokens"):
            dataset.get(5, offset, length)


def _total(dataset):
    return [x.tolist() for x in dataset[:]]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_travels_to_processes_as_its_path(tmp_path, method):
    build(tmp_path / "a", documents=[[[i] * 100] for i in range(1000)])
    dataset = IndexedDataset(tmp_path / "a")
    assert len(pickle.dumps(dataset)) < 300
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_total, (dataset,)) == _total(dataset)


@pytest.mark.parametrize("others", [DOCUMENTS[::-1], [*DOCUMENTS[:-1], [[100, 101, 102, 103, 99]]]])
def test_files_replaced_on_the_way_are_another_dataset(tmp_path, others):
    """A worker that starts late would make other samples under the numbers of the old ones."""
    build(tmp_path / "a")
    dataset = IndexedDataset(tmp_path / "a")
    pickled = pickle.dumps(dataset)
    assert pickle.loads(pickled)[0].tolist() == dataset[0].tolist() == [5, 0, 7]
    build(tmp_path / "a", documents=others)
    with pytest.raises(ValueError, match=r"a: expected the dataset that was open .*do not replace"):
        pickle.loads(pickled)
    assert dataset[0].tolist() == [5, 0, 7]


def test_empty_dataset(tmp_path):
    build(tmp_path / "a", documents=[])
    dataset = IndexedDataset(tmp_path / "a")
    dataset.expect_random_access()
    assert len(dataset) == dataset.num_documents == 0
    assert dataset[:] == []


@pytest.mark.skipif(os.name == "nt", reason="there directories are not synced")
@pytest.mark.parametrize("unknown", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_that_syncs_no_directories(tmp_path, monkeypatch, unknown):
    def fsync(descriptor, fsync=os.fsync):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    number = unknown
    build(tmp_path / "a")
    assert len(IndexedDataset(tmp_path / "a")) == 6
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        build(tmp_path / "a")


def test_append_joins_as_one_run_would(tmp_path):
    build(tmp_path / "a")
    build(tmp_path / "b", documents=DOCUMENTS[::-1])
    with IndexedDatasetBuilder(tmp_path / "joined", "u2") as builder:
        builder.append(tmp_path / "a")
        builder.append(tmp_path / "b")
    build(tmp_path / "once", documents=DOCUMENTS + DOCUMENTS[::-1])
    for suffix in (".bin", ".idx"):
        joined = (tmp_path / f"joined{suffix}").read_bytes()
        assert joined == (tmp_path / f"once{suffix}").read_bytes()


def test_append_of_sequences_that_lie_elsewhere_leaves_nothing(tmp_path):
    """Tokens and lengths were copied: sequences that have changed places got each other's."""
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        builder.add_documents([1, 2, 3, 4, 5, 6], [3, 3])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[42:58] = struct.pack("<qq", 6, 0)  # the pointers
    (tmp_path / "a.idx").write_bytes(index)
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [4, 5, 6]
    with (
        pytest.raises(ValueError, match=r"do not lie one behind the other.*`mb-data validate .*a`"),
        IndexedDatasetBuilder(tmp_path / "joined", "u2") as builder,
    ):
        builder.append(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_append_of_another_dtype_leaves_nothing(tmp_path):
    build(tmp_path / "a", "i4")
    with (
        pytest.raises(ValueError, match="holds int32, the output uint16"),
        IndexedDatasetBuilder(tmp_path / "joined", "u2") as builder,
    ):
        builder.append(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


@pytest.mark.parametrize(
    ("dtype", "token"),
    [("u2", 65536), ("u2", -1), ("i1", 128), ("i4", 2**31), ("u2", 0.5), ("u2", "a"), ("f4", "1")],
)
def test_tokens_that_do_not_fit(tmp_path, dtype, token):
    with (
        pytest.raises(ValueError, match="do not fit"),
        IndexedDatasetBuilder(tmp_path / "a", dtype) as builder,
    ):
        builder.add_document([1, token])
    assert os.listdir(tmp_path) == []


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="float16 is not in the format; use uint8"):
        IndexedDatasetBuilder(tmp_path / "a", "f2")
    with IndexedDatasetBuilder(tmp_path / "a", "u2") as builder:
        with pytest.raises(ValueError, match="sum to 3, got 2 tokens"):
            builder.add_document([1, 2], [3])
        with pytest.raises(ValueError, match="between 0 and"):
            builder.add_document([1, 2], [3, -1])
        for lengths in ([2.7], [[1, 1]], 2, "2"):  # whose index would fit no tokens
            with pytest.raises(ValueError, match="sequence lengths must be whole numbers in one"):
                builder.add_documents([1, 2], lengths)
            with pytest.raises(ValueError, match="sequences per document must be whole numbers"):
                builder.add_documents([1, 2], [1, 1], lengths)
        with pytest.raises(ValueError, match="one-dimensional"):
            builder.add_document([[1, 2]])
        with pytest.raises(ValueError, match="one-dimensional"):
            builder.add_documents(np.zeros((2, 3), "u2"), [1, 1])
        with pytest.raises(ValueError, match="whole numbers from -128 to 127"):
            builder.add_documents([1, 2], [1, 1], modes=[0, 128])
        with pytest.raises(ValueError, match=r"expected 2 modes.*got \(1,\)"):
            builder.add_documents([1, 2], [1, 1], modes=[0])
        builder.add_document([], [], modes=[])
        with pytest.raises(ValueError, match="sum to 2, got 1 sequences"):
            builder.add_documents(np.array([1], "u2"), [1], [2])
        builder.finalize()
        with pytest.raises(ValueError, match="closed"):
            builder.add_document([1])


def test_an_error_keeps_the_old_dataset(tmp_path):
    build(tmp_path / "a")
    before = (tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes()
    with (
        pytest.raises(FileNotFoundError, match="missing"),
        IndexedDatasetBuilder(tmp_path / "a", "u2") as builder,
    ):
        builder.append(tmp_path / "missing")
    assert before == ((tmp_path / "a.bin").read_bytes(), (tmp_path / "a.idx").read_bytes())
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_index_truncated_anywhere_is_refused(tmp_path):
    build(tmp_path / "a")
    whole = (tmp_path / "a.idx").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "a.idx").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.idx: .*cut off"):
            IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"X", "not an index"),
        (0, b"TNTIDX\0\0", "mb-data convert"),
        (9, b"\2", "version 2"),
        (17, b"\x0c", "dtype code 12"),
        (34 + 12 * 6, b"\1", "from 0 to 6, got \\(1, 6\\)"),
        (34 + 12 * 6 + 8 * 5, b"\5", "from 0 to 6, got \\(0, 5\\)"),
    ],
)
def test_damaged_index_names_the_field(tmp_path, offset, value, message):
    build(tmp_path / "a")
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[offset : offset + len(value)] = value
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "a")


def test_bin_shorter_than_its_index(tmp_path):
    build(tmp_path / "a")
    whole = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"a\.bin: 23 bytes, but its index needs 24"):
        IndexedDataset(tmp_path / "a")


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.idx: no such file$"):
        IndexedDataset(tmp_path / "a")
    build(tmp_path / "a_text_sentence")
    for name in ("a", "a_text_document"):
        with pytest.raises(FileNotFoundError, match=r"no such file; there is .*a_text_sentence$"):
            IndexedDataset(tmp_path / name)
    build(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"without \.bin or \.idx"):
        IndexedDataset(tmp_path / "a.bin")
    (tmp_path / "t.jsonl").write_text('{"text": "a"}')
    with pytest.raises(FileNotFoundError, match=r"preprocess` makes .* such as t\.jsonl"):
        IndexedDataset(tmp_path / "t.jsonl")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.bin: no such file"):
        IndexedDataset(tmp_path / "a")


def test_a_file_that_cannot_be_mapped_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):  # as on some network file systems, and without a name
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    build(tmp_path / "a")
    monkeypatch.setattr("mb_data.system.mmap.mmap", refuse)
    with pytest.raises(OSError, match=r"a\.idx"):
        IndexedDataset(tmp_path / "a")
    with pytest.raises(OSError, match=r"a\.bin"):
        read_index_file(tmp_path / "a.bin")


def test_best_dtype():
    assert best_dtype(65_499) == np.uint16
    assert best_dtype(65_500) == np.int32
