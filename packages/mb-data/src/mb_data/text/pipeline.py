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
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mb_data.system import WorkerDiedError, how_it_ended
from mb_data.text.encode import Job, Result
from mb_data.text.partial_output import Place, State
from mb_data.text.reading import Archive, Block
from mb_data.text.worker import AHEAD, Key, serve

WRITES = 64  # under way in a worker; thousands would fill the pipe, and their answers the other way
TICK = 0.2  # seconds between calls of `tick` while nothing arrives


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
        ValueError: this process may not have workers.
        WorkerDiedError: a worker was killed.
        OSError: a worker could not read or write.
    """
    if multiprocessing.current_process().daemon:
        raise ValueError(
            "this process is a daemon, as workers of multiprocessing.Pool are, and may start none; "
            "take concurrent.futures.ProcessPoolExecutor, or give one call all files"
        )
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


_without_main = threading.Lock()


@contextlib.contextmanager
def _no_main_module() -> Generator[None]:
    """Let processes that start meanwhile see none, as in an interactive Python."""
    with _without_main:  # of two threads, one would take the other's stand-in for the module
        main = sys.modules["__main__"]
        stand_in = types.ModuleType("__main__")
        # Other threads may pickle what is defined there.
        vars(stand_in).update({**vars(main), "__spec__": None, "__file__": None})
        sys.modules["__main__"] = stand_in
        try:
            yield
        finally:
            sys.modules["__main__"] = main


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
            target=serve, args=(theirs, inherited, job, files, directory), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread, NumPy's idle ones included.
            warnings.simplefilter("ignore", DeprecationWarning)
            # A new Python runs the main module of this one again, and with it what a script does
            # outside `if __name__ == "__main__":`. Only a job that comes from there needs that, or
            # from __mp_main__, as it is called in such a Python.
            without = not fork and b"_main__" not in pickle.dumps(job)
            with _no_main_module() if without else contextlib.nullcontext():
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
