"""Unfinished output on disk: one writer at a time, goes on where a killed run stopped.

Everything lies in ``<prefix>.partial/``. Per key there are three growing files: the tokens, which
become the ``.bin`` file as they are, the sizes of the sequences (i32) and, for documents that were
split, their numbers of sequences (i32). ``state.json`` says how much of each is safely on disk: it
is replaced, never edited, and only after the files were synced. Lengths beyond it are of no
account, so a run may die at any point. The final names appear in ``finish`` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mb_data.indexed_dataset import bin_path, idx_path, sync_directory, write_index

LOCK_PATIENCE = 2.0  # seconds: workers of a killed run hold its lock until they notice


class Place(NamedTuple):
    """Lengths of one key's files, or positions in them: tokens, sequences, split documents."""

    tokens: int = 0
    sequences: int = 0
    counts: int = 0


class State(NamedTuple):
    """Where a run stands after its first ``blocks`` blocks.

    ``lines`` counts those of the current input file, ``position`` input bytes, ``reported`` bytes
    of the list of bad lines; the others are sums over all keys.
    """

    places: tuple[Place, ...]
    blocks: int = 0
    lines: int = 0
    position: int = 0
    documents: int = 0
    empty: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    reported: int = 0

    @property
    def tokens(self) -> int:
        return sum(place.tokens for place in self.places)


class PartialOutput:
    """The directory of an unfinished run; a context manager that holds its lock.

    Args:
        prefix: of the output; the directory is ``<prefix>.partial``.
        outputs: final prefix of each key's dataset.
        dtype: of the tokens.
        settings: JSON of all the output depends on; a run with other settings starts afresh.
        resume: False to start afresh in any case.

    Raises:
        ValueError: another run is writing this prefix.
    """

    def __init__(
        self,
        prefix: str,
        outputs: tuple[str, ...],
        dtype: np.dtype,
        settings: dict[str, Any],
        *,
        resume: bool = True,
    ) -> None:
        self.directory = Path(f"{prefix}.partial")
        self.report_target = Path(f"{prefix}_skipped.txt")
        self.outputs = outputs
        self.dtype = dtype
        self._settings = settings
        self._resume = resume
        self.state = State(tuple(Place() for _ in outputs))

    def __enter__(self) -> PartialOutput:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._acquire_lock())
            saved = self._load() if self._resume else None
            if saved is None:
                for path in self.directory.iterdir():
                    if path.name != "lock":
                        path.unlink()
                _write_synced(self.directory / "settings.json", self._settings)
            else:
                self.state = saved
            self._files = [stack.enter_context(open(path, "ab")) for path in self._all_files()]
            self._report = self._files[-1]
            self._report.truncate(self.state.reported)
            self._report.seek(0, os.SEEK_END)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # A mistake in the input or the command would meet the same end again: nothing to resume.
        if kind is None or issubclass(kind, ValueError):
            shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # closing a file flushes it, to a disk that may be full
            self._open.close()

    def key_files(self, key: int) -> tuple[Path, Path, Path]:
        """Files of tokens, sizes and counts of a key, which workers write into."""
        stem = self.directory / str(key)
        return stem.with_suffix(".tokens"), stem.with_suffix(".sizes"), stem.with_suffix(".counts")

    def report(self, line: str) -> int:
        """Add a line to the list of bad lines; returns the list's length in bytes."""
        self._report.write(f"{line}\n".encode(errors="backslashreplace"))
        return self._report.tell()

    def save(self, state: State) -> None:
        """Sync what was written and record ``state``, which must not be ahead of it."""
        self._report.flush()
        for file in self._files:
            os.fdatasync(file.fileno())
        _write_synced(self.directory / "state.json", _to_json(state))

    def finish(self, state: State) -> None:
        """Write the indices and give everything its final name."""
        for key, place in enumerate(state.places):
            tokens, sizes, counts = self.key_files(key)
            os.truncate(tokens, place.tokens * self.dtype.itemsize)
            with open(tokens, "rb") as file:
                os.fsync(file.fileno())
            with open(self.directory / f"{key}.idx", "wb") as index:
                split = _map_int32(counts, place.counts) if place.counts else None
                write_index(index, self.dtype, _map_int32(sizes, place.sequences), split)
                index.flush()
                os.fsync(index.fileno())
        for key, output in enumerate(self.outputs):
            # Without its index a .bin is no dataset: an old index must never meet new tokens.
            idx_path(output).unlink(missing_ok=True)
            os.replace(self.key_files(key)[0], bin_path(output))
            os.replace(self.directory / f"{key}.idx", idx_path(output))
        self.report_target.unlink(missing_ok=True)  # that of an earlier run says nothing now
        if state.reported:
            self._report.flush()
            os.replace(self._report.name, self.report_target)
        sync_directory(self.directory.parent)

    def _all_files(self) -> list[Path]:
        keys = range(len(self.outputs))
        return [*(path for key in keys for path in self.key_files(key)), self.directory / "bad"]

    def _load(self) -> State | None:
        """The saved state, if it is of these settings and the files are as long as it says."""
        try:
            settings = json.loads((self.directory / "settings.json").read_bytes())
            state = _from_json(json.loads((self.directory / "state.json").read_bytes()))
            if settings != self._settings:
                return None
            for key, place in enumerate(state.places):
                widths = (self.dtype.itemsize, 4, 4)
                for path, count, width in zip(self.key_files(key), place, widths, strict=True):
                    if path.stat().st_size < count * width:
                        return None
            if (self.directory / "bad").stat().st_size < state.reported:
                return None
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return state

    def _acquire_lock(self) -> int:
        import fcntl  # here: reading datasets needs no locks, which not every system has

        give_up = time.monotonic() + LOCK_PATIENCE
        path = self.directory / "lock"
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # the other run has just finished
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.fstat(lock).st_ino == path.stat().st_ino:
                        os.truncate(lock, 0)
                        os.pwrite(lock, str(os.getpid()).encode(), 0)
                        return lock
            except BlockingIOError:
                if time.monotonic() > give_up:
                    owner = os.pread(lock, 20, 0).decode() or "unknown"
                    os.close(lock)
                    raise ValueError(
                        f"another run (process {owner}) is writing {self.directory.stem}; "
                        "wait for it or choose another --output-prefix"
                    ) from None
                time.sleep(0.05)
            os.close(lock)


def _map_int32(path: Path, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype=np.int32)
    return np.memmap(path, dtype="<i4", mode="r", shape=(count,))


def _write_synced(path: Path, value: Any) -> None:
    """Replace a small JSON file such that there is always a whole one."""
    temporary = path.with_suffix(".new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _to_json(state: State) -> dict[str, Any]:
    return state._asdict()


def _from_json(fields: dict[str, Any]) -> State:
    fields["places"] = tuple(Place(*place) for place in fields["places"])
    return State(**fields)
