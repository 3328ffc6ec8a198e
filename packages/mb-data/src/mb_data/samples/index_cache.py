"""A cache file for the index arrays that a dataset is built on.

An index (which document, which offset, which order) follows from the sequence lengths and a few
settings, takes seconds to build and is shared by every process of a job. It is written once, then
mapped: all processes of a host share one copy of the pages.

The name of a file is a digest of its key: the settings and a digest of the data they were applied
to. Other data or other settings are another file, so a stale index cannot be read. A file appears
under its name only when it is whole; whoever finds a damaged one rebuilds it.

Layout, little endian:

| offset | field                                                               | type      |
|--------|---------------------------------------------------------------------|-----------|
| 0      | magic ``MBINDEX\\0``                                                 | 8 bytes   |
| 8      | length H of the header                                              | u64       |
| 16     | CRC-32 of the header                                                | u32       |
| 20     | header: key, and name, dtype, shape, offset, CRC-32 of every array  | H, JSON   |
| ...    | the arrays, each at a multiple of 64                                | as stated |
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import operator
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mb_data.system import lock, mapped, naming, written_whole

MAGIC = b"MBINDEX\x00"
FIXED = struct.Struct("<8sQI")
ALIGNMENT = 64
FORMAT = 1  # part of every key: raise it when the meaning of the arrays changes

Key = Mapping[str, Any]


class DamagedIndexError(ValueError):
    """The file is not a whole index, or not the one its name promises."""


class IndexArrays:
    """Named read-only arrays, mapped from a cache file or held in memory (``path`` is None).

    Pickles as its path when it has one, so that worker processes map the same pages.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray], path: Path | None = None) -> None:
        self.path = path
        self._arrays = {name: _read_only(array) for name, array in arrays.items()}

    def __getitem__(self, name: str) -> npt.NDArray:
        return self._arrays[name]

    def __reduce__(self) -> tuple[Callable[..., IndexArrays], tuple[Any, ...]]:
        if self.path is None:
            return type(self), (self._arrays,)
        return _reopen, (self.path,)


def digest(*arrays: npt.NDArray) -> str:
    """SHA-256 over the bytes of the arrays: the identity of the data that an index is built from.

    A sample index depends on the lengths of the sequences alone, so hashing those (1.8 GB/s) says
    exactly when a cached index still holds, wherever the files have been copied to.
    """
    state = hashlib.sha256()
    for array in arrays:
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.hexdigest()


def load_or_build(
    key: Key,
    build: Callable[[], Mapping[str, npt.NDArray]],
    *,
    prefix: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
) -> IndexArrays:
    """The arrays of ``key``: from the cache, or from ``build`` and then into the cache.

    Any number of processes may call this at once: one builds, the others wait for its file. Where
    the file system has no locks they all build, and the file is replaced by its equal.

    Args:
        key: JSON values that determine the arrays completely; ``key["kind"]`` starts the name.
        build: makes the arrays.
        prefix: of the dataset; without ``cache_dir`` the cache is ``<prefix>_index/``. If that
            cannot be written (a read-only data disk) the index stays in memory, with a warning.
        cache_dir: another place for the cache; an OSError if it cannot be written.
    """
    # A number of NumPy's is the same key as Python's.
    key = json.loads(json.dumps({**key, "format": FORMAT}, default=operator.index))
    directory = Path(f"{os.fspath(prefix)}_index" if cache_dir is None else cache_dir)
    name = hashlib.sha256(_canonical(key)).hexdigest()[:32]
    path = directory / f"{key['kind']}-{name}.mbindex"
    built = None
    try:
        with contextlib.suppress(FileNotFoundError, DamagedIndexError):
            return read_index_file(path, key)
        directory.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_suffix(".lock")):
            try:
                return read_index_file(path, key)
            except FileNotFoundError:
                pass
            except DamagedIndexError as error:
                warnings.warn(f"{error}; building it again", RuntimeWarning, stacklevel=3)
            built = build()
            write_index_file(path, key, built)
            return read_index_file(path, key)
    except OSError as error:
        if cache_dir is not None or error.errno == errno.EMFILE:
            raise
        warnings.warn(
            f"the index of {os.fspath(prefix)} stays in memory: {directory} cannot be written "
            f"({error.strerror or error}); choose another place with cache_dir "
            "(mb-train --data-cache-path)",
            RuntimeWarning,
            stacklevel=3,
        )
    return IndexArrays(built if built is not None else build())


def write_index_file(path: Path, key: Key, arrays: Mapping[str, npt.NDArray]) -> None:
    """Write the arrays in the layout above; the file is there whole or not at all."""
    entries: list[dict[str, Any]] = []
    offset = 0
    for name, array in arrays.items():
        offset += -offset % ALIGNMENT
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.newbyteorder("<").str,
                "shape": list(array.shape),
                "offset": offset,
                "crc32": zlib.crc32(_bytes_of(array)),
            }
        )
        offset += array.nbytes
    header = json.dumps({"key": dict(key), "arrays": entries, "bytes": offset}).encode()
    header += b" " * (-(FIXED.size + len(header)) % ALIGNMENT)
    with written_whole(path) as file:
        file.write(FIXED.pack(MAGIC, len(header), zlib.crc32(header)) + header)
        written = 0
        for entry, array in zip(entries, arrays.values(), strict=True):
            file.write(b"\0" * (entry["offset"] - written))
            file.write(_bytes_of(array))
            written = entry["offset"] + array.nbytes


def read_index_file(path: Path, key: Key | None = None, *, verify: bool = True) -> IndexArrays:
    """Map a file that ``write_index_file`` wrote.

    Args:
        key: what it must have been built from.
        verify: check the arrays against their CRC-32 (4 GB/s), not the header and length alone.

    Raises:
        FileNotFoundError: there is none.
        DamagedIndexError: it is cut off, altered, or belongs to another key.
    """
    buffer = mapped(path)
    if (size := len(buffer)) < FIXED.size:
        raise DamagedIndexError(f"{path}: damaged index: {size} bytes, the header is missing")
    magic, length, checksum = FIXED.unpack_from(buffer)
    if magic != MAGIC:
        raise DamagedIndexError(f"{path}: damaged index: starts with {magic!r}, not {MAGIC!r}")
    body = FIXED.size + length
    header = bytes(buffer[FIXED.size : body])
    if len(header) != length or zlib.crc32(header) != checksum:
        raise DamagedIndexError(f"{path}: damaged index: its header is cut off or altered")
    description = json.loads(header)
    if size != body + description["bytes"]:
        raise DamagedIndexError(
            f"{path}: damaged index: {size:,} bytes, expected {body + description['bytes']:,}"
        )
    if key is not None and _canonical(description["key"]) != _canonical(key):
        raise DamagedIndexError(f"{path}: damaged index: built from {description['key']}")
    arrays = {}
    for entry in description["arrays"]:
        shape = tuple(entry["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(buffer, np.dtype(entry["dtype"]), count, body + entry["offset"])
        if verify and zlib.crc32(_bytes_of(array)) != entry["crc32"]:
            raise DamagedIndexError(f"{path}: damaged index: array {entry['name']} is altered")
        arrays[entry["name"]] = array.reshape(shape)
    return IndexArrays(arrays, path.absolute())  # pickled as its path, see IndexedDataset


def _reopen(path: Path) -> IndexArrays:
    return read_index_file(path, verify=False)


def _read_only(array: npt.NDArray) -> npt.NDArray:
    """A view that cannot be written to, as what is mapped cannot: samples would change."""
    view = array.view()
    view.flags.writeable = False
    return view


def _canonical(key: Key) -> bytes:
    return json.dumps(dict(key), sort_keys=True).encode()


def _bytes_of(array: npt.NDArray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@contextlib.contextmanager
def _exclusive(path: Path) -> Generator[None]:
    """Hold a lock that ends with the process, however it ends."""
    with naming(path), open(path, "ab") as file:
        # Some network file systems refuse locks; then everyone builds.
        with contextlib.suppress(OSError):
            lock(file.fileno())
        try:
            yield
        finally:
            # Whoever comes later, on this lock or a new one, looks for the index before it builds.
            with contextlib.suppress(PermissionError):  # Windows keeps what is open
                path.unlink(missing_ok=True)
