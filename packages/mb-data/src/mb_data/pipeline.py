"""Worker processes that encode blocks and write them, in order, each to its own place.

A worker keeps a block's tokens and reports how many there are. As soon as all blocks before it
have reported, the parent knows where its tokens belong in the output, says so, and the worker
writes them there: tokens never travel between processes, and the files are those of a run with
one worker. A worker does not wait for its place: it goes on with up to ``AHEAD`` further blocks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.encode import Encoded, Job, encode_block
from mb_data.partial import Place
from mb_data.reading import Block

AHEAD = 2
CACHE_BYTES = 256 << 20  # what a worker may grow by before its tokenizer forgets
TICK = 0.2  # seconds between calls of `tick` while nothing arrives


class Counts(NamedTuple):
    """What a block holds of one key."""

    tokens: int
    sequences: int
    counts: int
    documents: int
    empty: int
    text_bytes: int


class Result(NamedTuple):
    """What a worker says of a block: ``Encoded`` with counts in place of arrays."""

    keys: list[Counts]
    lines: int
    bad_lines: int
    errors: list[tuple[int, int, str]]
    fatal: tuple[int, str] | None
    careful: int


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself, as when the system ran out of memory."""


def run_workers(
    job: Job,
    blocks: Iterator[tuple[int, Block]],
    *,
    workers: int,
    files: Sequence[tuple[Path, Path, Path]],
    place: Callable[[int, Block, Result], list[Place]],
    written: Callable[[int], None],
    tick: Callable[[], None],
) -> None:
    """Encode numbered blocks, consecutive from any number on, and write them into ``files``.

    Args:
        files: of tokens, sizes and counts, one triple a key.
        place: called for each block in order; returns where its data goes, or raises.
        written: called with a block's number when its data is in the files, in any order.
        tick: called at least every ``TICK`` seconds.

    Raises:
        WorkerDiedError: a worker was killed.
        OSError: a worker could not read or write.
    """
    reported: dict[int, tuple[_Worker, Block, Result]] = {}
    upcoming = next(blocks, None)
    next_place = upcoming[0] if upcoming else 0
    team: list[_Worker] = []
    try:
        for _ in range(workers):
            team.append(_Worker(job, files, [worker.connection for worker in team]))
        while True:
            while upcoming:
                worker = min(team, key=lambda member: (member.encoding, len(member.blocks)))
                # One block waits in the pipe; not one of megabytes, as it would fill the pipe.
                waiting = 0 if upcoming[1].data else 1
                if worker.encoding > waiting or len(worker.blocks) > AHEAD:
                    break
                worker.encode(*upcoming)
                upcoming = next(blocks, None)
            busy: dict[Any, _Worker] = {w.connection: w for w in team if w.blocks}
            if not busy:
                return
            for ready in wait([*busy, *(worker.process.sentinel for worker in team)], TICK):
                if ready not in busy:
                    raise next(w for w in team if w.process.sentinel == ready).death()
                worker = busy[ready]
                kind, number, value = worker.receive()
                if kind == "encoded":
                    reported[number] = worker, worker.blocks[number], value
                else:
                    written(number)
            while next_place in reported:
                worker, block, result = reported.pop(next_place)
                worker.write(next_place, place(next_place, block, result))
                next_place += 1
            tick()
    finally:
        for worker in team:
            worker.stop()


class _Worker:
    """A worker process, seen from the parent."""

    def __init__(
        self, job: Job, files: Sequence[tuple[Path, Path, Path]], siblings: list[Connection]
    ) -> None:
        # A fork is the fastest start and inherits the loaded tokenizer; it is only safe while no
        # other thread can hold a lock.
        fork = sys.platform == "linux" and threading.active_count() == 1
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self.connection, theirs = context.Pipe()
        inherited = [*siblings, self.connection] if fork else []
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, inherited, job, files), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, NumPy's idle ones included.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.blocks: dict[int, Block] = {}
        self.encoding = 0

    def encode(self, number: int, block: Block) -> None:
        self._send("encode", number, block)
        self.blocks[number] = block._replace(data=None)
        self.encoding += 1

    def write(self, number: int, places: list[Place]) -> None:
        self._send("write", number, places)

    def receive(self) -> tuple[str, int, Any]:
        try:
            kind, number, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self.death() from None
        if kind == "failed":
            raise value
        if kind == "encoded":
            self.encoding -= 1
        else:
            del self.blocks[number]
        return kind, number, value

    def death(self) -> WorkerDiedError:
        self.process.join(1)
        code = self.process.exitcode
        how = f"by signal {-code}" if code and code < 0 else f"with exit code {code}"
        places = [f"{b.path}, bytes {b.start:,} to {b.stop:,}" for b in self.blocks.values()]
        return WorkerDiedError(
            f"worker process {self.process.pid} ended {how} while it worked on "
            f"{'; '.join(places) or 'nothing'}. If memory ran out, use fewer --workers. "
            "Run the same command again to go on from here"
        )

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _send(self, *message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self.death() from None


def _serve(
    connection: Connection,
    inherited: list[Connection],
    job: Job,
    files: Sequence[tuple[Path, Path, Path]],
) -> None:
    """The worker's side: obey "encode" and "write" until the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    for other in inherited:  # or the end of the parent would go unnoticed
        other.close()
    targets = [[path.open("r+b", buffering=0) for path in paths] for paths in files]
    held: dict[int, Encoded] = {}
    limit = _resident_bytes() + CACHE_BYTES
    while True:
        try:
            command, number, value = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if command == "encode":
                held[number] = encoded = encode_block(job, value)
                reply = "encoded", number, _result(encoded)
            else:
                encoded = held.pop(number)
                for place, data, target in zip(value, encoded.keys, targets, strict=True):
                    _write_at(target[0], data.tokens, place.tokens)
                    _write_at(target[1], data.sizes, place.sequences)
                    _write_at(target[2], data.counts, place.counts)
                reply = "written", number, None
                del encoded
                if _resident_bytes() > limit:
                    job.tokenizer.forget()
                    limit = max(limit, _resident_bytes() + CACHE_BYTES)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            reply = "failed", number, error
        except Exception:
            reply = "failed", number, RuntimeError(f"in a worker:\n{traceback.format_exc()}")
        try:
            connection.send(reply)
        except BrokenPipeError:  # the parent is gone
            return


def _resident_bytes() -> int:
    """Memory of this process; where the system only tells its peak, that."""
    import resource  # here: not every system has it

    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def _result(encoded: Encoded) -> Result:
    keys = [
        Counts(len(k.tokens), len(k.sizes), len(k.counts), k.documents, k.empty, k.text_bytes)
        for k in encoded.keys
    ]
    return Result(keys, *encoded[1:])


def _write_at(file: FileIO, values: npt.NDArray, index: int) -> None:
    """Write an array to where its first element has this index."""
    view = np.ascontiguousarray(values).data.cast("B")
    offset = index * values.itemsize
    while view:
        try:
            count = os.pwrite(file.fileno(), view, offset)
        except OSError as error:  # which does not know the file
            raise OSError(error.errno, error.strerror, str(file.name)) from None
        view, offset = view[count:], offset + count
