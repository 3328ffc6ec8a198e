"""Samples from processes of their own, for datasets that make them in Python.

A BERT or T5 sample takes Python some 0.4 ms (benchmarks/samples.py). In a thread of the training
process that holds the interpreter's lock, which the training loop needs between any two kernels: a
GPU stood idle for two thirds of a BERT's step (mb-train's benchmarks/results/2026-11-24-h200.md). A
process takes nothing from the loop but the reading of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from mb_data.samples.blend import BlendedDataset
from mb_data.samples.packed_samples import PackedSamples
from mb_data.samples.sentence_index import SentenceSamples
from mb_data.system import WorkerDiedError, how_it_ended

# A terminal, a batch system or a launcher may signal all processes of a run. It is the training
# process that decides when these end: it closes their input.
_IGNORED = [
    name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]


def made_by_python(dataset: Any) -> bool:
    """Whether the samples of a dataset, of a blend or of packed ones, are worth processes."""
    if isinstance(dataset, BlendedDataset):
        return any(map(made_by_python, dataset.datasets))
    if isinstance(dataset, PackedSamples):
        return made_by_python(dataset.dataset)
    return isinstance(dataset, SentenceSamples)


class SampleReaders:
    """A few processes that each hold a copy of a dataset; any thread may ask for samples.

        with SampleReaders(dataset, 2) as read:
            samples = read([3, 5])  # [dataset[3], dataset[5]]

    A reader is a new interpreter, so neither locks nor the main module of this process are copied.
    It ends with this process, however that ends.

    Args:
        dataset: is pickled, so its class must be in a module that can be imported; token files and
            cached indices are opened anew.
        processes: at most so many calls are answered at a time, others wait.

    Raises:
        ValueError: less than one process.
        WorkerDiedError: (a call) a reader has ended, as the system ends what takes too much memory,
            or as a Ctrl-C within an earlier call ends it. What a sample raises is raised as it is,
            or as a RuntimeError where it cannot be pickled.
    """

    def __init__(self, dataset: Any, processes: int) -> None:
        if processes < 1:  # a call would wait for ever
            raise ValueError(f"expected 1 or more processes to read samples, got {processes}")
        pickled = pickle.dumps(dataset)
        self._readers = [_Reader() for _ in range(processes)]
        self._free: SimpleQueue[_Reader] = SimpleQueue()
        for reader in self._readers:
            with contextlib.suppress(BrokenPipeError):  # it has ended: the first call tells
                reader.send(pickled)
            self._free.put(reader)

    def __call__(self, indices: Sequence[int]) -> list[Any]:
        reader = self._free.get()
        try:
            return reader.read(indices)
        finally:
            self._free.put(reader)

    def close(self) -> None:
        """End the processes; no call may be under way."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> SampleReaders:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Reader:
    """One process, seen from the parent."""

    def __init__(self) -> None:
        ignore = f"import signal as s; [s.signal(getattr(s, n), s.SIG_IGN) for n in {_IGNORED}]"
        # It imports from where this process does, by a path that no variable holds: a folder may
        # have a colon in its name. -c alone would put the current folder first, and a queue.py that
        # lies there would be taken for Python's own. What is no text imports skip, such as a Path.
        path = [str(folder) or os.getcwd() for folder in sys.path if isinstance(folder, str)]
        serving = f"import sys; sys.path[:] = {path!a}; from mb_data.samples.readers import serve"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{ignore}; {serving}; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._broken_off = False

    def read(self, indices: Sequence[int]) -> list[Any]:
        assert self._process.stdout is not None
        question = pickle.dumps(indices)
        try:
            self.send(question)
            done, value = pickle.load(self._process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # the last: within an answer
            raise self._ended() from None
        except BaseException:  # a Ctrl-C: the next call would take the rest of this answer for its
            self._broken_off = True
            self._process.kill()
            raise
        if not done:
            raise value
        return value

    def send(self, pickled: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(pickled)
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate()

    def _ended(self) -> WorkerDiedError:
        how = how_it_ended(self._process.wait())
        if self._broken_off:
            return WorkerDiedError(
                f"process {self._process.pid}, which reads samples, was ended when a call was "
                "broken off before its answer was here: make SampleReaders anew"
            )
        return WorkerDiedError(
            f"process {self._process.pid}, which reads samples, ended {how}. If it printed no "
            "error, memory may have run out: use fewer (--num-workers)"
        )


def serve() -> None:
    """The reader's side: answer indices with samples until the input ends."""
    questions = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    dataset = pickle.load(questions)
    while True:
        try:
            indices = pickle.load(questions)
        except EOFError:
            return
        try:
            answer = True, [dataset[index] for index in indices]
        except Exception as error:
            told = error if _travels(error) else RuntimeError(f"{type(error).__name__}: {error}")
            told.add_note(f"In a process that reads samples:\n{traceback.format_exc()}")
            answer = False, told
        answers.write(pickle.dumps(answer))
        answers.flush()


def _travels(error: Exception) -> bool:
    """Whether an error can be pickled, and read again: one that takes two arguments cannot."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
