"""Samples from processes of their own are the same, so are errors, and no process outlives us."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mb_data import (
    BertDataset,
    BlendedDataset,
    FillInTheMiddle,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    MiddleTokens,
    PackedDataset,
    PackedSamples,
    SampleReaders,
    WorkerDiedError,
)
from mb_data.samples.masking import Vocabulary
from mb_data.samples.readers import made_by_python

VOCABULARY = Vocabulary(cls=1, sep=2, mask=3, pad=0, word_starts=np.arange(60) % 4 != 0)


@pytest.fixture
def bert(tmp_path):
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for _ in range(20):
            lengths = rng.integers(3, 12, 6)
            builder.add_document(rng.integers(20, 60, lengths.sum()), lengths)
    indexed = IndexedDataset(tmp_path / "x")
    return BertDataset(
        indexed, range(20), vocabulary=VOCABULARY, seq_length=32, num_samples=40, seed=1
    )


def equal(found, wanted):
    np.testing.assert_equal(found, wanted)
    return True


class Folder(str):
    """As path.py has it."""

    def __repr__(self):
        return f"Folder({super().__repr__()})"


def test_a_reader_imports_from_where_its_parent_does(tmp_path, monkeypatch):
    """Files of the current folder are taken for modules only if the parent takes them for such."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('a queue of waiting jobs')")
    (tmp_path / "a_users_own.py").write_text("class Samples(list): pass")
    odd = tmp_path / f"two{os.pathsep}in one"
    odd.mkdir()
    (odd / "odd_one.py").write_text("class Samples(list): pass")
    monkeypatch.chdir(tmp_path)
    with SampleReaders([3, 5], 1) as read:
        assert read([1]) == [5]
    monkeypatch.setattr(sys, "path", [*sys.path, ""])  # as in a notebook, where it is the first
    samples = importlib.import_module("a_users_own").Samples([3, 5])
    with SampleReaders(samples, 1) as read:
        assert read([1]) == [5]
    # A Path is skipped, a text of another class is read as it is.
    monkeypatch.setattr(sys, "path", [tmp_path, Folder(odd), *sys.path[:-1]])
    samples = importlib.import_module("odd_one").Samples([3, 5])
    with SampleReaders(samples, 1) as read:
        assert read([1]) == [5]


def test_samples_and_errors_are_those_of_the_dataset(bert):
    blend = BlendedDataset([bert, bert], [1.0, 2.0], size=30)
    packed = PackedSamples(blend, np.full((30, 1), 12), rooms=[32], most=2)
    with SampleReaders(packed, 2) as read:
        for indices in ([0, 3, 1], [], [14]):
            assert equal(read(indices), [packed[i] for i in indices])
        with pytest.raises(IndexError, match="sequence 15 of 15") as error:
            read([15])
        assert "In a process that reads samples" in error.value.__notes__[0]
        assert equal(read([2]), [packed[2]])
        processes = [reader._process for reader in read._readers]
    assert [process.poll() for process in processes] == [0, 0]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32])
def test_numbers_of_numpy_are_as_good_as_others(bert, tmp_path, kind):
    """Datasets add them to a seed, and multiply them by the bytes of a token."""
    packed = PackedSamples(bert, np.full((30, 1), 12), rooms=[32], most=2)
    with IndexedDatasetBuilder(tmp_path / "long", np.int32) as builder:
        builder.add_document(range(900))
    text = IndexedDataset(tmp_path / "long")
    whole = PackedDataset(text, range(1), seq_length=3, num_samples=500, eod=0, seed=1)
    changed = FillInTheMiddle(whole, MiddleTokens(1001, 1002, 1003), eod=0, rate=1.0, seed=2**31)
    for dataset in (bert, BlendedDataset([bert], [1.0], size=30), packed, whole, changed):
        assert equal(dataset[kind(14)], dataset[14])
        assert equal(dataset[-1], dataset[len(dataset) - 1])
    assert text.get(0, kind(100), kind(3)).tolist() == [100, 101, 102]
    for dataset in (bert, text):
        with pytest.raises(TypeError):
            dataset[0.0]


@pytest.mark.parametrize("processes", [0, -1])
def test_without_a_process_a_call_would_never_end(bert, processes):
    with pytest.raises(ValueError, match=f"expected 1 or more processes .*, got {processes}"):
        SampleReaders(bert, processes)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_reader_heeds_no_signal_but_the_last(bert):
    with SampleReaders(bert, 1) as read:
        (reader,) = read._readers
        read([0])
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(reader._process.pid, each)
        assert equal(read([5]), [bert[5]])
        reader._process.kill()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ended by signal 9.*--num-workers"):
                read([5])


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a program that ends at once")
def test_a_reader_that_never_began_is_told_by_the_first_call(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    dataset = bytes(1 << 20)  # more than a pipe holds
    ended = pytest.raises(WorkerDiedError, match=r"ended with exit code 1.*--num-workers")
    with SampleReaders(dataset, 1) as read, ended:
        read([5])


def test_a_call_that_is_broken_off_leaves_no_answer_to_the_next(bert, monkeypatch):
    """The next one got the samples of this one, and so did all that followed."""

    def interrupted(file):
        raise KeyboardInterrupt

    with SampleReaders(bert, 1) as read:
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read([5])
        with pytest.raises(WorkerDiedError, match=r"broken off.*make SampleReaders anew"):
            read([3])


def test_an_error_that_cannot_be_pickled_is_told(tmp_path, monkeypatch):
    (tmp_path / "a_damaged_set.py").write_text(
        "class Damaged(Exception):\n"
        "    def __init__(self, file, line): super().__init__(f'{file}, line {line}')\n"
        "class Samples:\n"
        "    def __getitem__(self, index): raise Damaged('x', index)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    samples = importlib.import_module("a_damaged_set").Samples()
    with SampleReaders(samples, 1) as read:
        with pytest.raises(RuntimeError, match="Damaged: x, line 7") as error:
            read([7])
        assert "In a process that reads samples" in error.value.__notes__[0]


@pytest.mark.parametrize("bytes_of_the_answer", [2, 100])
def test_a_reader_that_dies_within_an_answer(bert, bytes_of_the_answer):
    answer = pickle.dumps((True, [bert[0]]))
    with SampleReaders(bert, 1) as read:
        (reader,) = read._readers
        process, reader._process = reader._process, SimpleNamespace(
            pid=1, wait=lambda: -9, stdin=io.BytesIO(),
            stdout=io.BytesIO(answer[:bytes_of_the_answer]),
        )  # fmt: skip
        with pytest.raises(RuntimeError, match=r"ended by signal 9.*--num-workers"):
            read([0])
        reader._process = process


ORPHAN = """
import os, pickle, sys
from mb_data import SampleReaders
read = SampleReaders(pickle.load(open(sys.argv[1], "rb")), 1)
read([0])
print(read._readers[0]._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_killed_training_leaves_no_reader_behind(bert, tmp_path):
    (tmp_path / "dataset").write_bytes(pickle.dumps(bert))
    words = [sys.executable, "-c", ORPHAN, str(tmp_path / "dataset")]
    said = subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout
    while still_runs(int(said)):  # it ends as soon as it reads the end of its input
        time.sleep(0.01)


def still_runs(pid):
    """Whether it does; what has ended may be listed for ever, where nobody asks for its status."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except FileNotFoundError:
        return False


def test_who_makes_samples_in_python(bert, tmp_path):
    text = GPTDataset(bert.indexed, range(20), seq_length=8, num_samples=4, seed=1)
    assert made_by_python(bert)
    assert made_by_python(PackedSamples(bert, bert.lengths(), rooms=[32], most=2))
    assert made_by_python(BlendedDataset([text, bert], [1.0, 1.0], size=4))
    assert not made_by_python(text)
    assert not made_by_python(BlendedDataset([text, text], [1.0, 1.0], size=4))
