"""The index cache: keyed by content and settings, whole or absent, one builder at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import warnings

import numpy as np
import pytest
from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.indexed_dataset import IndexedDataset
from mb_data.samples.gpt import GPTDataset
from mb_data.samples.index_cache import DamagedIndexError, digest, load_or_build, read_index_file

ARRAYS = {
    "a": np.arange(7, dtype=np.int32),
    "empty": np.zeros(0, np.uint32),
    "b": np.arange(6, dtype=np.int64).reshape(3, 2),
}


def build(tmp_path, key=None, arrays=ARRAYS, cache_dir=None):
    calls = []

    def count():
        calls.append(1)
        return arrays

    index = load_or_build(
        key or {"kind": "test", "x": 1}, count, prefix=tmp_path / "d", cache_dir=cache_dir
    )
    return index, len(calls)


def test_second_call_reads_what_the_first_wrote(tmp_path):
    first, built = build(tmp_path)
    assert built == 1
    again, built = build(tmp_path)
    assert built == 0
    for name, array in ARRAYS.items():
        for index in (first, again, pickle.loads(pickle.dumps(again))):
            assert index[name].dtype == array.dtype
            assert index[name].shape == array.shape
            assert (index[name] == array).all()
            assert index is first or index[name].ctypes.data % 64 == 0
    assert not again["a"].flags.writeable
    assert [path.suffix for path in (tmp_path / "d_index").iterdir()] == [".mbindex"]


def test_other_key_is_another_file(tmp_path):
    build(tmp_path)
    _, built = build(tmp_path, {"kind": "test", "x": 2})
    assert built == 1
    assert len(list((tmp_path / "d_index").iterdir())) == 2


def test_digest_sees_values_dtype_and_place():
    a, b = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)
    different = [(a,), (b,), (a, b), (b, a), (a[:3],), (a[::-1],), (a.reshape(2, 2),), ()]
    assert len({digest(*arrays) for arrays in different}) == len(different)
    unaligned = np.frombuffer(b"x" + a.tobytes(), np.int32, 4, 1)
    assert digest(unaligned) == digest(a)


def test_changed_data_or_settings_never_meet_a_stale_index(tmp_path):
    def dataset(**change):
        settings = {"seq_length": 4, "num_samples": 20, "seed": 1} | change
        documents = settings.pop("documents", range(9))
        return GPTDataset(IndexedDataset(tmp_path / "d"), documents, **settings)

    def write(sizes):
        with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
            for size in sizes:
                builder.add_document(np.arange(size))

    def files():
        return len(list((tmp_path / "d_index").iterdir()))

    write([9] * 9)
    dataset()
    for number, change in enumerate(
        [{"seq_length": 5}, {"num_samples": 21}, {"seed": 2}, {"documents": range(1, 9)}], 2
    ):
        dataset(**change)
        assert files() == number
    dataset()
    assert files() == 5
    write([9] * 8 + [8])
    assert len(dataset()) == (2 * 80 - 1) // 4
    assert files() == 6


@pytest.mark.parametrize("damage", ["empty", "short", "long", "magic", "header", "array", "swap"])
def test_damaged_file_is_refused_and_rebuilt(tmp_path, damage):
    index, _ = build(tmp_path)
    path = index.path
    content = bytearray(path.read_bytes())
    if damage == "empty":
        content = content[:0]
    elif damage == "short":
        content = content[:-1]
    elif damage == "long":
        content += b"\0"
    elif damage == "swap":
        other, _ = build(tmp_path, {"kind": "test", "x": 2})
        content = other.path.read_bytes()
    else:
        place = {"magic": 0, "header": 20, "array": len(content) - 3}[damage]
        content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedIndexError, match="damaged index"):
        read_index_file(path, {"kind": "test", "x": 1, "format": 1})
    with pytest.warns(RuntimeWarning, match=r"damaged index.*building it again"):
        again, built = build(tmp_path)
    assert built == 1
    assert (again["b"] == ARRAYS["b"]).all()
    assert build(tmp_path)[1] == 0


def test_failed_build_leaves_nothing(tmp_path):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build({"kind": "test"}, fail, prefix=tmp_path / "d", cache_dir=None)
    assert not list((tmp_path / "d_index").iterdir())


def test_full_disk_keeps_the_index_in_memory(tmp_path, monkeypatch):
    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.warns(RuntimeWarning, match=r"stays in memory: .*No space left.*cache_dir"):
        index, built = build(tmp_path)
    assert built == 1
    assert index.path is None
    assert (pickle.loads(pickle.dumps(index))["a"] == ARRAYS["a"]).all()
    assert not list((tmp_path / "d_index").iterdir())
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path, cache_dir=tmp_path / "chosen")


def test_an_index_that_may_not_be_opened_too_is_no_matter_of_its_disk(tmp_path, may_open):
    with may_open(0), pytest.raises(OSError, match=r"allow more with `ulimit -n .*mbindex"):
        build(tmp_path)


def test_chosen_directory(tmp_path):
    index, _ = build(tmp_path, cache_dir=tmp_path / "x" / "y")
    assert index.path.parent == tmp_path / "x" / "y"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        build(tmp_path, cache_dir=tmp_path / "file")


def _racer(prefix, log, start):
    def slow():
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return ARRAYS

    start.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = load_or_build({"kind": "race"}, slow, prefix=prefix, cache_dir=None)
    assert (index["b"] == ARRAYS["b"]).all()


def test_of_many_processes_one_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    racers = [
        context.Process(target=_racer, args=(tmp_path / "d", tmp_path / "log", start))
        for _ in range(6)
    ]
    for racer in racers:
        racer.start()
    start.set()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * 6
    assert (tmp_path / "log").read_text() == "built\n"
    assert len(list((tmp_path / "d_index").iterdir())) == 1
