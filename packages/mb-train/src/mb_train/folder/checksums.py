"""Checksums of a checkpoint's files, as `sha256sum` writes and checks them.

    cd RUN/iter_0000100 && sha256sum --check SHA256SUMS

SHA-256 because every processor of the last years has instructions for it (1 to 2 GB/s a core) and
every machine has the command. Each rank sums what it writes; the files are checked by all ranks
together, each its share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")
_BUFFER_BYTES = 2**20
# Written between two requests to take them to the disk; other sizes were not tried, for what it is
# worth see benchmarks/results/2026-11-26-four-gpus.md.
_AHEAD_BYTES = 2**26


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""


class SummedFile:
    """A stream of bytes into a buffered file, summed on their way.

    A thread that writes beside the training asks it for the interpreter's lock after every write
    and every sum. So there are few of them: small pieces gather in the buffer whatever `flush`
    asks for, and a large one is written and summed whole (benchmarks/writing.py).

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._sum = file, hashlib.sha256()
        self.size = self._under_way = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it."""
        self._sum.update(data)
        written = self._file.write(data)
        self.size += written
        if self.size - self._under_way >= _AHEAD_BYTES:
            self._begin()
        return written

    def _begin(self) -> None:
        """Have the system take what there is to the disk meanwhile. It would not before `fsync`,
        as long as it has memory, and the disk would idle while the file is summed."""
        self._under_way = self.size
        self._file.flush()
        if hasattr(os, "posix_fadvise"):  # on Linux this begins to write, and does not wait
            with contextlib.suppress(OSError):  # a file system may refuse advice
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Nothing: torch asks for it after every tensor."""

    def sum(self) -> str:
        """SHA-256 of what was written, 64 hexadecimal digits."""
        return self._sum.hexdigest()


@contextlib.contextmanager
def summed_file(path: Path) -> Generator[SummedFile]:
    """Yield a new file to write, which is on the disk at the end of the block.

    Raises:
        OSError: it cannot be written, whatever else the block raises for that reason.
    """
    with _naming(path), path.open("wb", buffering=_BUFFER_BYTES) as file:
        try:
            yield SummedFile(file)
        except RuntimeError as error:
            # torch's writer tells of positions in its file instead.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def sum_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with _naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _naming(path: Path) -> AbstractContextManager[None]:
    from mb_data.system import naming  # here: NumPy comes with it, and help does not wait for that

    return naming(path)


def format_sums(sums: Mapping[str, str]) -> str:
    """Lines of a SHA256SUMS file, by file name."""
    return "".join(f"{value}  {name}\n" for name, value in sorted(sums.items()))


def read_sums(path: Path) -> dict[str, str]:
    """Sums by file name.

    Raises:
        ValueError: not such a file.
    """
    sums = {}
    with _naming(path):
        content = path.read_bytes()
    for line in content.decode("utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path} is damaged: {line[:80]!r} is no line of a SHA256SUMS file.")
        sums[match[2]] = match[1]
    return sums


def damage(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names` of a folder, in words; empty if nothing is."""
    found = []
    for name in names:
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif name not in sums:
            found.append(f"{folder / SUMS_FILE} does not list {name}")
        elif sum_of(path) != sums[name]:
            found.append(f"{path} is damaged: it is not what was written")
    return found
