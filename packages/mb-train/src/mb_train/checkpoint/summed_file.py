"""A checkpoint's file, whose checksum is known once it is written."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO

from mb_data.system import naming

_BUFFER_BYTES = 2**20
# Written between two requests to take them to the disk; other sizes were not tried, for what it is
# worth see benchmarks/results/2026-11-26-four-gpus.md.
_AHEAD_BYTES = 2**26


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
    with naming(path), path.open("wb", buffering=_BUFFER_BYTES) as file:
        try:
            yield SummedFile(file)
        except RuntimeError as error:
            # torch's writer tells of positions in its file instead.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
