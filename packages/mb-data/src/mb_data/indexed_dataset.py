"""Token files in Megatron-LM's memory-mapped format: ``<prefix>.bin`` and ``<prefix>.idx``.

The ``.bin`` file is every token of every sequence, one after the other, with no header. The
``.idx`` file says where each sequence starts and which sequences make up a document. Both are
read through ``mmap``: opening costs nothing, a sequence is a view, and any number of processes
share one copy of the pages.

Layout of the ``.idx`` file, little endian, for N sequences in D - 1 documents:

| offset   | field                                                   | type    |
|----------|---------------------------------------------------------|---------|
| 0        | magic ``MMIDIDX\\0\\0``                                   | 9 bytes |
| 9        | version, 1                                              | u64     |
| 17       | dtype code, see ``DTYPES``                              | u8      |
| 18       | N                                                       | u64     |
| 26       | D                                                       | u64     |
| 34       | tokens of each sequence                                 | i32 × N |
| 34 + 4N  | byte offset of each sequence in ``.bin``                | i64 × N |
| 34 + 12N | first sequence of each document, then N: starts with 0  | i64 × D |
| then     | mode of each sequence, in multimodal datasets only      | i8 × N  |

A sequence is a document, or a sentence of one when the text was split into sentences. The arrays
start at an odd multiple of two bytes; NumPy reads them unaligned.
"""

from __future__ import annotations

import glob
import mmap
import operator
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from mb_data.system import mapped
from mb_data.words import counted

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

# Code 7 is float32 in Megatron Core, and was float64 in the Megatron-LM of 2022 that MegaBlocks
# forked. `read_index` tells which from the distance of the pointers. Written are 6 for float64,
# which both read alike, and 7 for float32.
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
DTYPE_CODES: dict[np.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}

_END = 1 << 14  # entries at either end by which a dataset is known: all of them could take minutes


def best_dtype(vocab_size: int) -> np.dtype:
    """The dtype Megatron picks for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def checked_index(index: SupportsIndex, count: int, noun: str, where: str) -> int:
    """A number from 0 up to but not ``count``, from one that may count from the end, as -1 does.

    A Python int even of NumPy's numbers, which overflow in what is made of them: a sample's seed,
    a place in a file. Raises IndexError outside, TypeError for what is no whole number.
    """
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"{noun} {number} of {count} in {where}")
    return number % count


def _reopen(kind: type[IndexedDataset], prefix: str, random: bool, content: int) -> IndexedDataset:
    dataset = kind(prefix)
    if dataset._content() != content:
        raise ValueError(
            f"{prefix}: expected the dataset that was open in the process which sends it here, got "
            "another one under its name, whose samples would be others: do not replace the files "
            "of a dataset in use"
        )
    if random:
        dataset.expect_random_access()
    return dataset


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """Reads a ``.bin``/``.idx`` pair. Length and indices count sequences.

    ``dataset[i]`` is a read-only view of the tokens, ``dataset[a:b]`` a list of them. Pickles as
    its path, so it travels to worker processes, forked or spawned, for free. One whose files have
    been replaced meanwhile cannot be unpickled: a ValueError.

    Attributes:
        sizes: int32 [N], tokens of each sequence.
        pointers: int64 [N], byte offset of each sequence.
        document_indices: int64 [D], first sequence of each document, then N.
        modes: int8 [N], what each sequence is in a multimodal dataset; None in all others.
        tokens: [sum of sizes], all tokens in order.
        dtype: of the tokens.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is not in this format, or shorter than it says.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        # What it pickles as: a process in another folder has to open these files, not its own.
        self._place = os.path.abspath(self.prefix)
        index = read_index(self.prefix)
        self.dtype, self.sizes, self.pointers, self.document_indices, self.modes = index

        path = bin_path(self.prefix)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, although {path.stem}.idx is there")
        have = path.stat().st_size
        # What the sizes claim, datasets reserve memory for: hold it against what is there.
        want = int(self.sizes.sum(dtype=np.int64)) * self.dtype.itemsize
        if have < want:
            raise ValueError(
                f"{path}: {have:,} bytes, but its index needs {want:,}; the file is cut off or "
                "its index damaged, preprocess again or copy it again"
            )
        self._buffer = mapped(path)
        self._random: mmap.mmap | None = None  # the same, once random access is expected
        self.tokens: npt.NDArray[Any] = np.frombuffer(
            self._buffer, dtype=self.dtype, count=have // self.dtype.itemsize
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @overload
    def __getitem__(self, index: SupportsIndex) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(
        self, index: SupportsIndex | slice
    ) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(index)

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self.get(i) for i in range(len(self)))

    def get(
        self, index: SupportsIndex, offset: SupportsIndex = 0, length: SupportsIndex | None = None
    ) -> npt.NDArray[Any]:
        """``length`` tokens of one sequence from ``offset`` on, to its end if ``length`` is None.

        Raises IndexError outside the dataset, ValueError outside the sequence.
        """
        index = checked_index(index, len(self), "sequence", self.prefix)
        size, offset = int(self.sizes[index]), operator.index(offset)
        length = size - offset if length is None else operator.index(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(
                f"{self.prefix}: sequence {index} has {counted(size, 'token')}, "
                f"asked for {length} from {offset}"
            )
        first = int(self.pointers[index])
        if first < 0 or first + size * self.dtype.itemsize > len(self._buffer):
            raise ValueError(
                f"{idx_path(self.prefix)}: damaged: sequence {index} has {size} tokens from byte "
                f"{first:,} on, {bin_path(self.prefix).name} has {len(self._buffer):,} bytes"
            )
        start = first + offset * self.dtype.itemsize
        end = start + length * self.dtype.itemsize
        if self._random is not None and end - start > mmap.PAGESIZE:
            # All pages of it in one request, where each would be one of its own: a fifth of the
            # time for 32 kB from a cold disk (benchmarks/cold_reads.py).
            page = start - start % mmap.PAGESIZE
            self._random.madvise(mmap.MADV_WILLNEED, page, end - page)
        return np.frombuffer(self._buffer, dtype=self.dtype, count=length, offset=start)

    def expect_random_access(self) -> None:
        """Tell the system that neighbours of what is read are not wanted: shuffled samples of a
        dataset that is not in memory would read hundreds of times what they need."""
        if isinstance(self._buffer.obj, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
            self._buffer.obj.madvise(mmap.MADV_RANDOM)
            self._random = self._buffer.obj

    def document(self, index: int) -> range:
        """The sequences of one document; IndexError outside, ValueError for a damaged index."""
        if not 0 <= index < self.num_documents:
            raise IndexError(
                f"{self.prefix}: expected a document from 0 up to but not {self.num_documents}, "
                f"as many as there are, got {index}"
            )
        first, stop = self.document_indices[index : index + 2].tolist()
        if not 0 <= first <= stop <= len(self):
            raise ValueError(
                f"{idx_path(self.prefix)}: damaged: document {index} runs from sequence {first} "
                f"to {stop} of {len(self)}"
            )
        return range(first, stop)

    def boundaries(self, documents: range) -> npt.NDArray[np.int64]:
        """First sequence of each of these documents, and the end of the last; ValueError for a
        damaged index, or documents that it has not."""
        if not 0 <= documents.start < documents.stop <= self.num_documents or documents.step != 1:
            raise ValueError(
                f"{self.prefix}: {documents} is no part of its "
                f"{counted(self.num_documents, 'document')}"
            )
        found = self.document_indices[documents.start : documents.stop + 1]
        wrong = np.flatnonzero(
            (found[:-1] > found[1:]) | (found[:-1] < 0) | (found[1:] > len(self))
        )
        if len(wrong):
            self.document(documents.start + int(wrong[0]))
        return found

    def check_plain(self) -> None:
        """Raise ValueError for what holds no documents or sentences: conversations, fractions."""
        if self.dtype.kind == "f":
            raise ValueError(
                f"{self.prefix}: holds numbers of {self.dtype}, which are no tokens; preprocess "
                "texts, or build a dataset of whole numbers"
            )
        if self.modes is not None:
            raise ValueError(
                f"{self.prefix}: holds conversations, of whose tokens some are to be learned; take "
                "build_conversation_datasets, or mb-train --sft"
            )

    def _content(self) -> int:
        """A number that tells this dataset from another, by how much it holds and by both ends."""
        tokens = np.frombuffer(self._buffer, np.uint8)
        found = 0
        for part in (tokens, self.sizes, self.document_indices):
            for piece in (np.array(len(part)), part[:_END], part[-_END:]):
                found = zlib.crc32(piece.tobytes(), found)
        return found

    def __reduce__(self) -> tuple[Callable[..., IndexedDataset], tuple[type, str, bool, int]]:
        return _reopen, (type(self), self._place, self._random is not None, self._content())

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self.prefix!r}: {counted(self.num_documents, 'document')}, "
            f"{counted(len(self), 'sequence')}, {self.dtype.name})"
        )


class Index(NamedTuple):
    """What an ``.idx`` file holds: N sequences in D - 1 documents."""

    dtype: np.dtype
    sizes: npt.NDArray[np.int32]  # [N]
    pointers: npt.NDArray[np.int64]  # [N]
    documents: npt.NDArray[np.int64]  # [D]
    modes: npt.NDArray[np.int8] | None  # [N]


def similar_prefixes(prefix: str | os.PathLike[str]) -> list[str]:
    """At most five other datasets that `preprocess` may have written for this name."""
    path = Path(prefix)
    stem = path.name.removesuffix("_document").removesuffix("_sentence")
    found = path.parent.glob(f"{glob.escape(stem)}_*.idx")
    return sorted(str(index.with_suffix("")) for index in found if index.stem != path.name)[:5]


def read_index(prefix: str | os.PathLike[str]) -> Index:
    """Map ``<prefix>.idx``.

    Checks the header, the file's length, the ends of the arrays and that no size is negative;
    ``mb_data.maintenance.validate`` checks the rest.
    """
    path = idx_path(prefix)
    if not path.is_file():
        hint = ""
        if Path(prefix).suffix in (".bin", ".idx"):
            hint = "; give the path without .bin or .idx"
        elif similar := similar_prefixes(prefix):
            hint = f"; there is {', '.join(similar)}"
        elif Path(prefix).is_file():
            hint = f"; `mb-data preprocess` makes a dataset of a text such as {Path(prefix).name}"
        raise FileNotFoundError(f"{path}: no such file{hint}")
    buffer = mapped(path)
    if bytes(buffer[: len(LEGACY_MAGIC)]) == LEGACY_MAGIC:
        raise ValueError(f"{path}: the old TNTIDX format; run `mb-data convert` on it once")
    if len(buffer) < HEADER.size:
        raise ValueError(
            f"{path}: {len(buffer)} bytes, but the header alone has {HEADER.size}; it is cut off"
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise ValueError(f"{path}: not an index: starts with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version}, this reader knows version {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{path}: dtype code {code}, expected one of {sorted(DTYPES)}")

    end_sizes = HEADER.size + 4 * num_sequences
    end_pointers = end_sizes + 8 * num_sequences
    end_documents = end_pointers + 8 * num_entries
    if len(buffer) < end_documents:
        field = "sequence lengths"
        if len(buffer) >= end_sizes:
            field = "sequence pointers" if len(buffer) < end_pointers else "document boundaries"
        raise ValueError(
            f"{path}: {len(buffer):,} bytes, but {num_sequences:,} sequences and {num_entries:,} "
            f"document boundaries need {end_documents:,}; it is cut off in the {field}"
        )
    sizes = np.frombuffer(buffer, "<i4", num_sequences, HEADER.size)
    pointers = np.frombuffer(buffer, "<i8", num_sequences, end_sizes)
    documents = np.frombuffer(buffer, "<i8", num_entries, end_pointers)
    if num_entries == 0 or documents[0] != 0 or documents[-1] != num_sequences:
        ends = (int(documents[0]), int(documents[-1])) if num_entries else "nothing"
        raise ValueError(
            f"{path}: document boundaries must run from 0 to {num_sequences}, got {ends}"
        )
    if num_sequences and sizes.min() < 0:
        where = int((sizes < 0).argmax())
        raise ValueError(f"{path}: damaged: sequence {where} has length {sizes[where]}")
    modes = None
    if len(buffer) == end_documents + num_sequences:
        modes = np.frombuffer(buffer, "<i1", num_sequences, end_documents)
    dtype = DTYPES[code]
    if code == 7 and num_sequences > 1:
        longest = int(sizes[:-1].argmax())
        step = int(pointers[longest + 1]) - int(pointers[longest])
        if step and step == 8 * int(sizes[longest]):
            dtype = np.dtype("<f8")
    return Index(dtype, sizes, pointers, documents, modes)
