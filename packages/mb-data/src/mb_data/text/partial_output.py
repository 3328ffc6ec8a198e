"""Unfinished output on disk. It has one writer at a time, and a later run can continue it.

Everything is in ``<prefix>.partial/``. For each key there are three growing files: the tokens,
which become the ``.bin`` file as they are, the sizes of the sequences (i32) and, for documents that
were split, their numbers of sequences (i32). ``state.json`` says how much of each is safely on
disk, and the sum of its numbers. It is replaced, never edited, and only after the files were
synced. What the files hold beyond that is ignored, so a run may die at any point. Only ``finish``
makes the final names.

Finished work is never dropped silently: a run with other settings is refused unless ``restart`` is
given. A directory of that name that holds anything else is always refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.dataset_builder import name_files, write_index
from mb_data.system import naming, sync_directory, sync_file, try_lock
from mb_data.untrusted import json_of
from mb_data.words import counted

LOCK_PATIENCE = 2.0  # seconds: workers of a killed run hold its lock until they notice


class Place(NamedTuple):
    """Lengths of one key's files, or positions in them: tokens, sequences, split documents.

    Or the sums of the numbers there.
    """

    tokens: int = 0
    sequences: int = 0
    counts: int = 0

    def plus(self, other: Place) -> Place:
        """Of both together."""
        return Place(*map(sum, zip(self, other, strict=True)))


class State(NamedTuple):
    """Where a run stands after its first ``blocks`` blocks.

    A unit of work is a block, or an archive of many. The blocks are those of the first ``units``
    units, and ``inside`` more of the next one, an archive. ``lines`` counts lines of the current
    input file, ``position`` input bytes, ``reported`` bytes of the list of bad lines.
    Lines longer than ``line_limit`` are bad. The other fields are sums over all keys.

    Attributes:
        places: lengths of each key's files.
        sums: of the numbers in them. Workers write a file in any order: only what does not depend
            on it can be known of all while they do. A flipped bit changes the sum.
    """

    places: tuple[Place, ...]
    sums: tuple[Place, ...]
    blocks: int = 0
    units: int = 0
    inside: int = 0
    lines: int = 0
    position: int = 0
    documents: int = 0
    empty: int = 0
    text_bytes: int = 0
    bad_lines: int = 0
    careful: int = 0
    reported: int = 0
    line_limit: int = 0

    @property
    def tokens(self) -> int:
        return sum(place.tokens for place in self.places)


class PartialOutput:
    """The directory of an unfinished run; a context manager that holds its lock.

    Args:
        prefix: of the output; the directory is ``<prefix>.partial``.
        outputs: final prefix of each key's dataset.
        dtype: of the tokens.
        settings: JSON of all the output depends on.
        resume: False if the input cannot be read twice: then nothing is kept.
        restart: drop what an earlier run has left.

    Raises:
        ValueError: another run is writing this prefix; or what is there has other settings, or was
            not made here.
    """

    def __init__(
        self,
        prefix: str,
        outputs: tuple[str, ...],
        dtype: np.dtype,
        settings: dict[str, Any],
        *,
        resume: bool = True,
        restart: bool = False,
    ) -> None:
        self.directory = Path(f"{prefix}.partial")
        self.report_target = Path(f"{prefix}_skipped.txt")
        self.outputs = outputs
        self.dtype = dtype
        self._settings = settings
        self.resume = resume
        self._restart = restart
        nothing = tuple(Place() for _ in outputs)
        self.state = State(nothing, nothing)
        self.kept = 0  # blocks that are safely on disk

    def __enter__(self) -> PartialOutput:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._acquire_lock())
            saved = None if self._restart else self._load()
            if saved is None or not self.resume:
                self._remove_files()
                _write_synced(self.directory / "settings.json", self._settings)
            else:
                self.state = saved
                self.kept = saved.blocks
            self._files = [stack.enter_context(open(path, "ab")) for path in self._all_files()]
            self._report = self._files[-1]
            self._report.truncate(self.state.reported)
            self._report.seek(0, os.SEEK_END)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None or not self.kept or not self.resume:
            with contextlib.suppress(OSError):
                self._remove_files()
                (self.directory / "lock").unlink(missing_ok=True)
                self.directory.rmdir()
        with contextlib.suppress(OSError):  # closing a file flushes it, to a disk that may be full
            self._open.close()

    def key_files(self, key: int) -> tuple[Path, Path, Path]:
        """Files of tokens, sizes and counts of a key, which workers write into."""
        stem = self.directory / str(key)
        return stem.with_suffix(".tokens"), stem.with_suffix(".sizes"), stem.with_suffix(".counts")

    def report(self, line: str) -> int:
        """Add a line to the list of bad lines; returns the list's length in bytes."""
        with naming(self._report.name):
            self._report.write(f"{line}\n".encode(errors="backslashreplace"))
        return self._report.tell()

    def save(self, state: State) -> None:
        """Sync what was written and record ``state``, which must not be ahead of it.

        Of input that cannot be read twice nothing is recorded: no later run could go on from there.
        """
        with naming(self.directory):
            self._report.flush()
            for file in self._files:
                sync_file(file.fileno())
        if self.resume:
            _write_synced(self.directory / "state.json", _to_json(state))
        self.kept = state.blocks

    def finish(self, state: State) -> None:
        """Write the indices and give everything its final name."""
        for file in self._files:
            file.close()  # or Windows would not rename it
        for key, place in enumerate(state.places):
            tokens, sizes, counts = self.key_files(key)
            os.truncate(tokens, place.tokens * self.dtype.itemsize)
            with open(tokens, "rb") as file:
                os.fsync(file.fileno())
            target = self.directory / f"{key}.idx"
            with naming(target), open(target, "wb") as index:
                split = _map(counts, _SIZES, place.counts) if place.counts else None
                write_index(index, self.dtype, _map(sizes, _SIZES, place.sequences), split)
                index.flush()
                os.fsync(index.fileno())
        for key, output in enumerate(self.outputs):
            name_files(self.key_files(key)[0], self.directory / f"{key}.idx", output)
        self.report_target.unlink(missing_ok=True)  # that of an earlier run says nothing now
        if state.reported:
            os.replace(self._report.name, self.report_target)
        sync_directory(self.directory.parent)

    def _all_files(self) -> list[Path]:
        keys = range(len(self.outputs))
        return [*(path for key in keys for path in self.key_files(key)), self.directory / "bad"]

    def _remove_files(self) -> None:
        """Remove all that a run makes, except its lock."""
        for path in self.directory.iterdir():
            if path.name != "lock" and _OURS.fullmatch(path.name):
                path.unlink()

    def _refuse_others(self) -> None:
        """Raise ValueError if the directory holds anything that a run does not make."""
        others = [p.name for p in self.directory.iterdir() if not _OURS.fullmatch(p.name)]
        if others:
            raise ValueError(
                f"{self.directory} is the place for unfinished output, but holds {others[0]}, "
                "which is something else; move it or choose another --output-prefix"
            )

    def _load(self) -> State | None:
        """The saved state; None if there is none, or a damaged one, or its files do not hold what
        it says.

        Raises ValueError if it has other settings.
        """
        try:
            settings = json_of((self.directory / "settings.json").read_bytes())
            state = _from_json(json_of((self.directory / "state.json").read_bytes()))
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return None
        if not isinstance(settings, dict):
            return None
        try:
            if settings != self._settings:
                names = {*settings, *self._settings}
                other = [n for n in sorted(names) if settings.get(n) != self._settings.get(n)]
                raise ValueError(
                    f"{self.directory} keeps {counted(state.documents, 'document')} of a run that "
                    f"was interrupted, with other settings ({', '.join(other)}); give that command "
                    "again to go on, or --restart to drop them"
                )
            for key, (place, sums) in enumerate(zip(state.places, state.sums, strict=True)):
                dtypes = self.dtype, _SIZES, _SIZES
                for file in zip(self.key_files(key), dtypes, place, sums, strict=True):
                    if not _holds(*file):
                        return None
            if (self.directory / "bad").stat().st_size < state.reported:
                return None
        except FileNotFoundError:
            return None
        return state

    def _acquire_lock(self) -> int:
        if self.directory.exists():
            if not self.directory.is_dir():
                raise ValueError(f"{self.directory} is in the way; choose another --output-prefix")
            with contextlib.suppress(FileNotFoundError):  # the other run has just finished
                self._refuse_others()
        give_up = time.monotonic() + LOCK_PATIENCE
        path = self.directory / "lock"
        while True:
            self.directory.mkdir(exist_ok=True)
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # the other run has just finished
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, lock)
                try:
                    free = try_lock(lock)
                except OSError as error:  # as on some network file systems
                    warnings.warn(
                        f"{self.directory}: this file system has no locks ({error.strerror}); see "
                        "that no other run writes the same output",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                    stack.pop_all()
                    return lock
                with contextlib.suppress(FileNotFoundError):  # it has finished since
                    if free and os.fstat(lock).st_ino == path.stat().st_ino:
                        with naming(path):
                            os.ftruncate(lock, 0)
                            os.lseek(lock, 0, os.SEEK_SET)
                            os.write(lock, str(os.getpid()).encode())
                        stack.pop_all()
                        return lock
                    if not free and time.monotonic() > give_up:
                        owner = path.read_bytes()[:20].decode() or "unknown"
                        raise ValueError(
                            f"another run (process {owner}) is writing {self.directory.stem}; "
                            "wait for it or choose another --output-prefix"
                        )
            if not free:
                time.sleep(0.05)


def is_unfinished(folder: str) -> bool:
    """Whether a run keeps its state there: output may lie beside the input."""
    return folder.endswith(".partial") and os.path.isfile(os.path.join(folder, "lock"))


_OURS = re.compile(r"lock|bad|(settings|state)\.(json|new)|\d+\.(tokens|sizes|counts|idx|idx\.old)")


_SIZES = np.dtype("<i4")


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(count,))


def _holds(path: Path, dtype: np.dtype, count: int, total: int) -> bool:
    """Whether a file begins with so many numbers, of this sum."""
    if path.stat().st_size < count * dtype.itemsize:
        return False
    return sum_of(_map(path, dtype, count)) == total


def sum_of(numbers: npt.NDArray) -> int:
    """The sum of a file's numbers, or of those of a part of it."""
    return int(numbers.sum(dtype=np.int64))


def _write_synced(path: Path, value: Any) -> None:
    """Replace a small JSON file so that there is always a whole one."""
    temporary = path.with_suffix(".new")
    with naming(path), open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _to_json(state: State) -> dict[str, Any]:
    fields = state._asdict()
    # Where to go on stands in a few numbers, and another one would be another output.
    return {**fields, "crc32": zlib.crc32(json.dumps(fields).encode())}


def _from_json(fields: dict[str, Any]) -> State:
    """Raises KeyError, TypeError, ValueError or AttributeError for what is no state."""
    if fields.pop("crc32") != zlib.crc32(json.dumps(fields).encode()):
        raise ValueError("it is not what was written")
    for name in ("places", "sums"):
        fields[name] = tuple(Place(*place) for place in fields[name])
    return State(**fields)
