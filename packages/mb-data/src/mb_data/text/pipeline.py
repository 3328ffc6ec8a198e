"""Worker processes that encode blocks and write them, in order, each to its own place.

A worker keeps a block's tokens and reports how many there are. As soon as all blocks before it
have reported, the parent knows where its tokens belong in the output, says so, and the worker
writes them there: tokens never travel between processes, and the files are those of a run with
one worker. A worker does not wait for its place: it goes on with up to ``AHEAD`` further blocks,
or with the archive that it unpacks, whose blocks then wait in its ``SpillBuffer``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.system import WorkerDiedError, how_it_ended, naming, resident_bytes, write_all
from mb_data.text.encode import Encoded, Job, encode_block
from mb_data.text.partial_output import Place, State
from mb_data.text.reading import Archive, Block
from mb_data.text.spill import SpillBuffer

AHEAD = 2
WRITES = 64  # under way in a worker; thousands would fill the pipe, and their answers the other way
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
    """What a worker reports of a block: ``Encoded`` with counts instead of arrays."""

    keys: list[Counts]
    lines: int
    bad_lines: int
    errors: list[tuple[int, int, str]]
    fatal: tuple[int, str] | None
    careful: int


# A block by its unit of work and its place in that, 0 where the unit is a block.
Key = tuple[int, int]


def run_workers(
    job: Job,
    work: Iterator[tuple[int, Block | Archive]],
    *,
    start: State,
    workers: int,
    files: Sequence[tuple[Path, Path, Path]],
    directory: Path,
    place: Callable[[Block, Result, int, int], list[Place]],
    written: Callable[[int], None],
    tick: Callable[[], None],
) -> None:
    """Encode numbered units of work, consecutive from any number on, and write them into ``files``.

    Args:
        start: what is done; the first unit is number ``start.units``, without the first
            ``start.inside`` blocks.
        files: of tokens, sizes and counts, one triple a key.
        directory: for what waits for its place.
        place: called for each block in order, with the units and the blocks of the next one that
            are done with it; returns where its data goes, or raises.
        written: called with a block's number when its data is in the files, in any order.
        tick: called at least every ``TICK`` seconds.

    Raises:
        WorkerDiedError: a worker was killed.
        OSError: a worker could not read or write.
    """
    reported: dict[Key, tuple[_Worker, Block, Result]] = {}
    ends: dict[int, int] = {}  # of units: how many blocks there were
    unit, inside, number = start.units, start.inside, start.blocks
    upcoming = next(work, None)
    team: list[_Worker] = []
    try:
        for _ in range(workers):
            team.append(_Worker(job, files, directory, [w.connection for w in team]))
        while True:
            while upcoming:
                worker = min(team, key=lambda member: (len(member.tasks), len(member.blocks)))
                if not worker.takes(upcoming[1]):
                    break
                if isinstance(upcoming[1], Block):
                    ends[upcoming[0]] = 1
                worker.give(*upcoming, start.inside if upcoming[0] == start.units else 0)
                upcoming = next(work, None)
            busy: dict[Any, _Worker] = {w.connection: w for w in team if w.tasks or w.blocks}
            if not busy:
                return
            for ready in wait([*busy, *(worker.process.sentinel for worker in team)], TICK):
                if ready not in busy:
                    raise next(w for w in team if w.process.sentinel == ready).death()
                worker = busy[ready]
                kind, key, value = worker.receive()
                if kind == "encoded":
                    reported[key] = worker, *value
                elif kind == "end":
                    ends[key[0]] = key[1]
                else:
                    written(value)
            while True:
                while ends.get(unit) == inside:
                    unit, inside = unit + 1, 0
                if (unit, inside) not in reported:
                    break
                if reported[unit, inside][0].writes == WRITES:
                    break
                worker, block, result = reported.pop((unit, inside))
                whole = ends.get(unit) == inside + 1
                places = place(block, result, unit + whole, 0 if whole else inside + 1)
                worker.write((unit, inside), number, places)
                inside, number = inside + 1, number + 1
            tick()
    finally:
        for worker in team:
            worker.process.terminate()
        for worker in team:
            worker.stop()


class _Worker:
    """A worker process, seen from the parent."""

    def __init__(
        self,
        job: Job,
        files: Sequence[tuple[Path, Path, Path]],
        directory: Path,
        siblings: list[Connection],
    ) -> None:
        # A fork is the fastest start and inherits the loaded tokenizer; it is only safe while no
        # other thread can hold a lock.
        fork = sys.platform == "linux" and threading.active_count() == 1
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self.connection, theirs = context.Pipe()
        inherited = [*siblings, self.connection] if fork else []
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, inherited, job, files, directory), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, NumPy's idle ones included.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.tasks: dict[int, Block | Archive] = {}  # units of work that it has not finished
        self.blocks: dict[Key, Block] = {}  # those encoded, but not written yet
        self.writes = 0  # those told to be written

    def takes(self, task: Block | Archive) -> bool:
        """Whether to give it one more unit of work now."""
        unwritten = len({unit for unit, _ in (*self.blocks, *((unit, 0) for unit in self.tasks))})
        # One block may wait in the pipe, unless it holds megabytes of data, which would fill it. No
        # archive waits, and nothing waits behind one.
        small = isinstance(task, Block) and not task.data
        small = small and not any(isinstance(other, Archive) for other in self.tasks.values())
        return len(self.tasks) <= small and unwritten <= AHEAD

    def give(self, unit: int, task: Block | Archive, skip: int) -> None:
        self._send("encode", (unit, skip), task)
        self.tasks[unit] = task._replace(data=None) if isinstance(task, Block) else task

    def write(self, key: Key, number: int, places: list[Place]) -> None:
        self._send("write", key, (number, places))
        self.writes += 1

    def receive(self) -> tuple[str, Key, Any]:
        try:
            kind, key, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self.death() from None
        if kind == "failed":
            raise value
        if kind == "encoded":
            self.blocks[key] = value[0]
        if kind == "written":
            del self.blocks[key]
            self.writes -= 1
        if kind == "end" or (kind == "encoded" and isinstance(self.tasks[key[0]], Block)):
            del self.tasks[key[0]]
        return kind, key, value

    def death(self) -> WorkerDiedError:
        self.process.join(1)
        places = [
            f"{task.path}, bytes {task.start:,} to {task.stop:,}"
            if isinstance(task, Block)
            else task.source.path
            for task in self.tasks.values()
        ]
        return WorkerDiedError(
            f"worker process {self.process.pid} ended {how_it_ended(self.process.exitcode)} while "
            "it worked on "
            f"{'; '.join(places) or 'nothing'}. If memory ran out, use fewer --workers. "
            "Then run the same command again"
        )

    def stop(self) -> None:
        self.connection.close()
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
    directory: Path,
) -> None:
    """The worker's side: obey "encode" and "write" until the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    for other in inherited:  # or the end of the parent would go unnoticed
        other.close()
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(path.open("r+b", buffering=0)) for path in chain(*files)]
        servant = _Servant(connection, job, targets, directory)
        while True:
            try:
                command, key, value = connection.recv()
            except (EOFError, OSError):
                return
            try:
                servant.obey(command, key, value)
                continue
            except (ValueError, OSError, ModuleNotFoundError) as error:
                reply = "failed", key, error
            except Exception:
                reply = "failed", key, RuntimeError(f"in a worker:\n{traceback.format_exc()}")
            try:
                connection.send(reply)
            except BrokenPipeError:  # the parent is gone
                return


class _Servant:
    """What a worker process does when told to."""

    def __init__(
        self,
        connection: Connection,
        job: Job,
        targets: list[FileIO],
        directory: Path,
    ) -> None:
        self.connection = connection
        self.job = job
        self.targets = targets
        self.unwritten = SpillBuffer(directory, AHEAD + 1)
        self.memory = resident_bytes() + CACHE_BYTES

    def obey(self, command: str, key: Key, value: Any) -> None:
        if command == "write":
            self.write(key, *value)
        elif isinstance(value, Block):
            self.encode(key, value)
        else:
            self.unpack(key, value)

    def unpack(self, key: Key, archive: Archive) -> None:
        """Encode the blocks of an archive, from one on; meanwhile "write" is all that is asked."""
        unit, inside = key
        for block in islice(archive.blocks(), inside, None):
            self.encode((unit, inside), block)
            inside += 1
            self.forget()
            while self.connection.poll():
                self.obey(*self.connection.recv())
        self.connection.send(("end", (unit, inside), None))

    def encode(self, key: Key, block: Block) -> None:
        encoded = encode_block(self.job, block)
        self.unwritten.put(key, [a for k in encoded.keys for a in (k.tokens, k.sizes, k.counts)])
        self.connection.send(("encoded", key, (block._replace(data=None), _result(encoded))))

    def write(self, key: Key, number: int, places: list[Place]) -> None:
        offsets = [index for place in places for index in place]
        for target, array, index in zip(
            self.targets, self.unwritten.take(key), offsets, strict=True
        ):
            _write_at(target, array, index)
        self.connection.send(("written", key, number))
        self.forget()

    def forget(self) -> None:
        if resident_bytes() > self.memory:
            self.job.tokenizer.forget()
            self.memory = max(self.memory, resident_bytes() + CACHE_BYTES)


def _result(encoded: Encoded) -> Result:
    keys = [
        Counts(len(k.tokens), len(k.sizes), len(k.counts), k.documents, k.empty, k.text_bytes)
        for k in encoded.keys
    ]
    return Result(keys, *encoded[1:])


def _write_at(file: FileIO, values: npt.NDArray, index: int) -> None:
    """Write an array to where its first element has this index."""
    with naming(str(file.name)):
        file.seek(index * values.itemsize)
        write_all(file, np.ascontiguousarray(values).data.cast("B"))
