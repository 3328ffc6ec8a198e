"""Arrays that wait to be written: a few in memory, the others in a file without a name."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.system import naming, write_all


class _Stored(NamedTuple):
    """Where in the file an array lies."""

    offset: int
    count: int
    dtype: np.dtype


class SpillBuffer:
    """Keeps arrays by a key until they are taken.

    Args:
        directory: where to make the file.
        room: the arrays of how many keys stay in memory.
    """

    def __init__(self, directory: Path, room: int) -> None:
        self.directory = directory
        self.room = room
        self._near: dict[Hashable, Sequence[npt.NDArray]] = {}
        self._far: dict[Hashable, list[_Stored]] = {}
        self._file: IO[bytes] | None = None

    def put(self, key: Hashable, arrays: Sequence[npt.NDArray]) -> None:
        """Raises OSError where the disk is full."""
        if len(self._near) < self.room:
            self._near[key] = arrays
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        stored = []
        for array in arrays:
            stored.append(_Stored(self._file.tell(), array.size, array.dtype))
            with naming(self.directory):
                write_all(self._file, np.ascontiguousarray(array).data.cast("B"))
        self._far[key] = stored

    def take(self, key: Hashable) -> Sequence[npt.NDArray]:
        if key in self._near:
            return self._near.pop(key)
        file = self._file
        assert file is not None, "taken once more, or never put"
        arrays = []
        for offset, count, dtype in self._far.pop(key):
            array = np.empty(count, dtype=dtype)
            file.seek(offset)
            view = array.data.cast("B")
            while view:
                view = view[file.readinto(view) :]  # ty: ignore[missing-attribute]
            arrays.append(array)
        if self._far:
            file.seek(0, 2)
        else:
            file.close()  # and its bytes are gone
            self._file = None
        return arrays
