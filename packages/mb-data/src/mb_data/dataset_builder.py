"""Writing ``.bin`` and ``.idx``: whole, or not at all. ``indexed_dataset`` has their layout."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from mb_data.indexed_dataset import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    bin_path,
    idx_path,
)
from mb_data.system import naming, sync_directory

PIECE = 1 << 20  # elements of an index written in one go


def check_output_prefix(prefix: str | os.PathLike[str]) -> str:
    """A prefix that files can be written under; raises ValueError or FileNotFoundError if not."""
    path = os.fspath(prefix)
    folder, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise ValueError(
            f"output prefix {path!r}: expected one that ends in a name, as in out/corpus"
        )
    if not os.path.isdir(folder or "."):
        raise FileNotFoundError(f"{folder}: no such directory for the output")
    for end in (".bin", ".idx"):
        check_no_directory(path + end)
    return path


def check_no_directory(path: str) -> str:
    """A path that a file can be written under; raises ValueError for a directory's."""
    with contextlib.suppress(FileNotFoundError):  # a name that is too long is said now
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise ValueError(f"{path} is a directory; choose another output prefix")
    return path


class IndexedDatasetBuilder:
    """Writes a ``.bin``/``.idx`` pair, document by document.

    Everything goes to temporary names beside the target. ``finalize`` syncs and renames, the
    ``.idx`` last, so a dataset with an index is whole. As a context manager it finalizes on
    success and leaves nothing behind on an error.

    Raises:
        ValueError: the dtype has no code in the format, or tokens do not fit into it; a prefix that
            ends in no name.
        FileNotFoundError: the directory of the prefix is missing.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.prefix = check_output_prefix(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES:
            names = ", ".join(d.name for d in DTYPE_CODES)
            raise ValueError(f"dtype {np.dtype(dtype).name} is not in the format; use {names}")
        self._sizes = array("i")
        self._counts = array("i")  # sequences of each document
        self._modes = array("b")  # of each sequence; empty unless the dataset is multimodal
        self._temporary = f"{self.prefix}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        self._bin: IO[bytes] | None = open(f"{self._temporary}.bin", "xb", buffering=1 << 20)  # noqa: SIM115

    def add_document(
        self,
        tokens: npt.ArrayLike,
        sequence_lengths: Sequence[int] | None = None,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Append one document: ``tokens`` [n], cut into sequences of the given lengths.

        Without lengths the document is one sequence.
        """
        values = np.asarray(tokens)
        lengths = [values.size] if sequence_lengths is None else sequence_lengths
        self.add_documents(values, lengths, [len(lengths)], modes)

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        sequence_lengths: npt.ArrayLike,
        sequences_per_document: npt.ArrayLike | None = None,
        modes: npt.ArrayLike | None = None,
    ) -> None:
        """Append many documents at once: ``tokens`` [n] of them all, lengths of all sequences.

        Without ``sequences_per_document`` every sequence is a document. ``modes``, one int8 for
        each sequence, are for multimodal datasets: given for all sequences or for none.
        """
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise ValueError(f"tokens of documents must be one-dimensional, got {values.shape}")
        lengths = _whole_numbers(sequence_lengths, "sequence lengths")
        if lengths.size and (lengths.min() < 0 or lengths.max() > np.iinfo(np.int32).max):
            raise ValueError(
                "sequence lengths must lie between 0 and 2**31 - 1, the format's limit, got "
                f"{lengths.min()} to {lengths.max()}"
            )
        if lengths.sum() != len(values):
            raise ValueError(f"sequence lengths sum to {lengths.sum()}, got {len(values)} tokens")
        if sequences_per_document is None:
            counts = np.ones(len(lengths), dtype=np.int64)
        else:
            counts = _whole_numbers(sequences_per_document, "sequences per document")
        if counts.sum() != len(lengths) or (counts < 0).any():
            raise ValueError(
                f"sequences per document sum to {counts.sum()}, got {len(lengths)} sequences"
            )
        kinds = np.asarray(() if modes is None else modes)
        if kinds.shape != (0 if modes is None else len(lengths),):
            raise ValueError(f"expected {len(lengths)} modes, one a sequence, got {kinds.shape}")
        whole = kinds.dtype.kind in "biu"
        if kinds.size and not (whole and kinds.min() >= -128 and kinds.max() <= 127):
            raise ValueError(f"modes must be whole numbers from -128 to 127, got {kinds}")
        if len(lengths) and len(self._sizes) and (modes is None) == bool(self._modes):
            raise ValueError(f"{self.prefix}: give modes with all sequences or with none")
        with naming(bin_path(self.prefix)):
            self._file.write(self._cast(values).data)
        self._modes.extend(kinds.tolist())
        self._counts.frombytes(counts.astype(np.int32).tobytes())
        self._sizes.frombytes(lengths.astype(np.int32).tobytes())

    def append(self, prefix: str | os.PathLike[str]) -> None:
        """Append a whole dataset of the same dtype, as Megatron's ``merge_file_`` does."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(
                f"{other.prefix} holds {other.dtype.name}, the output {self.dtype.name}; "
                "datasets are joined only within one dtype"
            )
        ends = np.concatenate(([0], np.cumsum(other.sizes, dtype=np.int64)))
        if not np.array_equal(other.pointers, ends[:-1] * other.dtype.itemsize):
            raise ValueError(
                f"{other.prefix}: its sequences do not lie one behind the other, nothing of it is "
                f"joined; see `mb-data validate {other.prefix}`"
            )
        # The tokens that the index accounts for: further bytes would shift all that follows.
        tokens = other.tokens[: int(ends[-1])]
        self.add_documents(tokens, other.sizes, np.diff(other.document_indices), other.modes)

    def finalize(self) -> None:
        """Write the index and give both files their names."""
        data = self._file
        sizes = np.frombuffer(self._sizes, dtype=np.int32)
        counts = np.frombuffer(self._counts, dtype=np.int32)
        try:
            with naming(idx_path(self.prefix)), open(f"{self._temporary}.idx", "xb") as index:
                write_index(index, self.dtype, sizes, counts, self._modes if self._modes else None)
                _sync(index)
            with naming(bin_path(self.prefix)):
                _sync(data)
                data.close()
            self._bin = None
            name_files(f"{self._temporary}.bin", f"{self._temporary}.idx", self.prefix)
            sync_directory(bin_path(self.prefix).parent)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written; does nothing after ``finalize``."""
        if self._bin is not None:
            with contextlib.suppress(OSError):  # on a full disk the flush fails once more
                self._bin.close()
            self._bin = None
        for suffix in (".bin", ".idx"):
            Path(self._temporary + suffix).unlink(missing_ok=True)

    @property
    def _file(self) -> IO[bytes]:
        if self._bin is None:
            raise ValueError(f"{self.prefix}: this builder is closed")
        return self._bin

    def _cast(self, tokens: npt.NDArray) -> npt.NDArray:
        if tokens.dtype == self.dtype or tokens.size == 0:
            return np.ascontiguousarray(tokens, dtype=self.dtype)
        whole = self.dtype.kind in "iu"
        if tokens.dtype.kind not in ("iu" if whole else "iuf"):
            raise ValueError(
                f"{self.prefix}: tokens of {tokens.dtype.name} do not fit {self.dtype.name}; "
                f"give {'whole numbers' if whole else 'numbers'}"
            )
        if whole:
            limits = np.iinfo(self.dtype.str)
            low, high = tokens.min(), tokens.max()
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"{self.prefix}: tokens {low} to {high} ({tokens.dtype.name}) do not fit "
                    f"{self.dtype.name}, which holds {limits.min} to {limits.max}"
                )
        return np.ascontiguousarray(tokens, dtype=self.dtype)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        elif self._bin is not None:
            self.finalize()


def name_files(tokens: str | Path, index: str | Path, prefix: str) -> None:
    """Give synced files the names of a dataset, in place of an earlier one of that prefix.

    An OSError, as of tokens that another program keeps from being replaced, leaves the earlier one.
    """
    # Without its index a .bin is no dataset: an old index must never meet new tokens.
    final, aside = idx_path(prefix), Path(f"{index}.old")
    with contextlib.suppress(FileNotFoundError):
        os.replace(final, aside)
    try:
        os.replace(tokens, bin_path(prefix))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.replace(aside, final)
        raise
    os.replace(index, final)
    with contextlib.suppress(OSError):  # the dataset is whole
        aside.unlink(missing_ok=True)


def write_index(
    file: IO[bytes],
    dtype: np.dtype,
    sizes: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32] | None = None,
    modes: array[int] | None = None,
) -> None:
    """Write an ``.idx`` from the tokens of each sequence and the sequences of each document.

    Without ``counts`` every sequence is a document; ``modes`` are those of a multimodal dataset.
    Works through the arrays piece by piece, so that they may be memory maps larger than memory.
    """
    documents = len(sizes) if counts is None else len(counts)
    file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], len(sizes), documents + 1))
    for start in range(0, len(sizes), PIECE):
        file.write(np.ascontiguousarray(sizes[start : start + PIECE], dtype="<i4").data)
    address = 0
    for start in range(0, len(sizes), PIECE):
        ends = address + np.cumsum(sizes[start : start + PIECE], dtype="<i8") * dtype.itemsize
        file.write(np.concatenate([[address], ends[:-1]]).astype("<i8").data)
        address = int(ends[-1])
    first = 0
    file.write(struct.pack("<q", first))
    for start in range(0, documents, PIECE):
        stop = min(start + PIECE, documents)
        if counts is None:
            ends = np.arange(start + 1, stop + 1, dtype="<i8")
        else:
            ends = first + np.cumsum(counts[start:stop], dtype="<i8")
        file.write(ends.data)
        first = int(ends[-1])
    if modes is not None:
        file.write(modes.tobytes())


def _whole_numbers(values: npt.ArrayLike, what: str) -> npt.NDArray[np.int64]:
    """In one row, int64; ValueError for fractions, of which an index would hold the rest."""
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "biu"):
        raise ValueError(f"{what} must be whole numbers in one row, got {found}")
    return found.astype(np.int64)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
