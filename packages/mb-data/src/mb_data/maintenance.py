"""Look into token files, check them, join them, read them back, bring old ones up to date."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mb_data.dataset_builder import IndexedDatasetBuilder
from mb_data.indexed_dataset import (
    DTYPES,
    HEADER,
    LEGACY_MAGIC,
    IndexedDataset,
    bin_path,
    idx_path,
)
from mb_data.text.partial_output import is_unfinished
from mb_data.tokenizer import Tokenizer

CHUNK = 1 << 22  # elements looked at in one go: bounds the memory of `validate`


@dataclass(frozen=True)
class Inspection:
    """What is in a dataset, from its index alone. Lengths are tokens of a sequence.

    ``tokens_by_mode`` is empty for a dataset without modes; in conversations 1 is what is learned.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    empty_sequences: int
    shortest: int
    mean: float
    longest: int
    bin_bytes: int
    idx_bytes: int
    tokens_by_mode: dict[int, int]


def inspect(prefix: str | os.PathLike[str]) -> Inspection:
    """Sizes and counts of a dataset; the errors of ``IndexedDataset``."""
    dataset = IndexedDataset(prefix)
    sizes = dataset.sizes
    tokens = int(sizes.sum(dtype=np.int64))
    return Inspection(
        prefix=dataset.prefix,
        dtype=str(dataset.dtype.name),
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=tokens,
        empty_sequences=int((sizes == 0).sum()),
        shortest=int(sizes.min()) if len(sizes) else 0,
        mean=tokens / len(sizes) if len(sizes) else 0.0,
        longest=int(sizes.max()) if len(sizes) else 0,
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        tokens_by_mode=_tokens_by_mode(dataset),
    )


def _tokens_by_mode(dataset: IndexedDataset) -> dict[int, int]:
    if dataset.modes is None:
        return {}
    modes, sizes = dataset.modes, dataset.sizes
    return {int(m): int(sizes[modes == m].sum(dtype=np.int64)) for m in np.unique(modes)}


def validate(prefix: str | os.PathLike[str], *, vocab_size: int | None = None) -> list[str]:
    """Everything that is wrong with a dataset, in words; an empty list if it is whole.

    Reads both files from end to end: lengths, pointers, document boundaries, file sizes, and with
    ``vocab_size`` that every token is below it.
    """
    try:
        dataset = IndexedDataset(prefix)
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    problems: list[str] = []
    index, data = idx_path(prefix), bin_path(prefix)
    sizes, pointers, documents = dataset.sizes, dataset.pointers, dataset.document_indices

    expected = HEADER.size + 12 * len(sizes) + 8 * len(documents)
    if dataset.modes is not None:
        expected += len(sizes)
    if index.stat().st_size != expected:
        problems.append(f"{index}: {index.stat().st_size:,} bytes, {expected:,} expected")
    address = 0
    for start in range(0, len(sizes), CHUNK):
        part = sizes[start : start + CHUNK].astype(np.int64)
        ends = address + part.cumsum() * dataset.dtype.itemsize
        wrong = pointers[start : start + CHUNK] != np.concatenate([[address], ends[:-1]])
        if wrong.any():
            where = start + int(wrong.argmax())
            problems.append(
                f"{index}: sequence {where} points to byte {pointers[where]:,}, not to the end of "
                "the one before it"
            )
            return problems
        address = int(ends[-1])
    if data.stat().st_size != address:
        problems.append(
            f"{data}: {data.stat().st_size:,} bytes, the index accounts for {address:,}"
        )
    for start in range(0, len(documents) - 1, CHUNK):
        falling = np.diff(documents[start : start + CHUNK + 1]) < 0
        if falling.any():
            where = start + int(falling.argmax())
            problems.append(
                f"{index}: document {where} starts at sequence {documents[where]}, the next one "
                f"before it at {documents[where + 1]}"
            )
            break
    if vocab_size is not None:
        problems += _tokens_outside(dataset, vocab_size)
    return problems


def merge(inputs: Sequence[str | os.PathLike[str]], output_prefix: str | os.PathLike[str]) -> int:
    """Join datasets of one dtype, in the order given; returns how many were joined.

    A directory stands for all datasets in it, sorted by name, as in Megatron; one that lacks a file
    is an error there too.

    All of them are validated before anything is written.

    Raises:
        ValueError: no dataset, one that is not whole, different kinds of them, or a directory with
            the unfinished work of ``preprocess``, or with what it made of several keys of a text.
    """
    prefixes: list[str] = []
    for item in inputs:
        if not os.fspath(item):  # as of a variable that is not set; Path takes it for this folder
            raise ValueError("expected datasets or directories of them to join, got an empty name")
        path = Path(item)
        if path.is_dir():
            unfinished = [p for p in sorted(path.iterdir()) if is_unfinished(str(p))]
            if unfinished:
                raise ValueError(
                    f"{unfinished[0]} keeps the work of a preprocessing run that has not ended; "
                    "let it end or delete that, or name the datasets to join; nothing was joined"
                )
            files = (p for end in (".idx", ".bin") for p in path.glob(f"*{end}"))
            found = sorted({p.with_suffix("") for p in files})
            # A killed builder may leave whole files under its temporary name.
            named = [p for p in found if p.suffix != ".partial"]
            _check_alike(named)
            prefixes += map(str, named)
        else:
            prefixes.append(str(path))
    if not prefixes:
        raise ValueError(f"no dataset in {', '.join(map(str, inputs))}")
    if idx_path(output_prefix).resolve() in [idx_path(prefix).resolve() for prefix in prefixes]:
        raise ValueError(f"{output_prefix} is an input; give the result another name")
    problems = [problem for prefix in prefixes for problem in validate(prefix)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{more}; nothing was joined")
    first = IndexedDataset(prefixes[0])
    for prefix in prefixes:
        other = IndexedDataset(prefix)
        if len(other) and len(first) and (other.modes is None) != (first.modes is None):
            plain, multimodal = (prefix, prefixes[0])[:: 1 if other.modes is None else -1]
            raise ValueError(f"{multimodal} has sequence modes, {plain} has none")
    with IndexedDatasetBuilder(output_prefix, first.dtype) as builder:
        for prefix in prefixes:
            builder.append(prefix)
    return len(prefixes)


def _check_alike(prefixes: Sequence[Path]) -> None:
    """Raise ValueError for several outputs of one run of ``preprocess``: titles are no more texts,
    and sentences no other ones than those of the documents."""
    seen: dict[str, Path] = {}
    for prefix in prefixes:
        written = re.fullmatch(r"(.+)_[^_]+_(document|sentence)", prefix.name)
        if written is None:
            continue
        other = seen.setdefault(written[1], prefix)
        if other != prefix:
            raise ValueError(
                f"{other} and {prefix} hold several --json-keys of the same text, or its documents "
                "and its sentences; name the datasets to join; nothing was joined"
            )


def shuffle(
    prefix: str | os.PathLike[str], output_prefix: str | os.PathLike[str], *, seed: int
) -> int:
    """Write a dataset's documents in a random order; returns their number.

    Splits into train, validation and test are ranges of documents: shuffled first, they are alike
    where the input was sorted, by source or by date.

    Raises:
        ValueError: a dataset that is not whole, the output would replace the input, a seed below 0.
    """
    if seed < 0:
        raise ValueError(f"the seed must be at least 0, got {seed}")
    if idx_path(prefix).resolve() == idx_path(output_prefix).resolve():
        raise ValueError(f"{output_prefix} is the input; give the result another name")
    problems = validate(prefix)
    if problems:
        raise ValueError(f"{problems[0]}; nothing was written")
    dataset = IndexedDataset(prefix)
    dataset.expect_random_access()
    order = np.random.default_rng(seed).permutation(dataset.num_documents)
    with IndexedDatasetBuilder(output_prefix, dataset.dtype) as builder:
        for document in order.tolist():
            sequences = dataset.document(document)
            lengths = dataset.sizes[sequences.start : sequences.stop]
            modes = None
            if dataset.modes is not None:
                modes = dataset.modes[sequences.start : sequences.stop]
            parts = [dataset.get(i) for i in sequences]
            tokens = np.concatenate([np.zeros(0, dataset.dtype), *parts])
            builder.add_documents(tokens, lengths, [len(lengths)], modes)
    return dataset.num_documents


def decode(prefix: str | os.PathLike[str], document: int, tokenizer: Tokenizer) -> str:
    """The text of one document, its sentences joined; IndexError outside the dataset."""
    dataset = IndexedDataset(prefix)
    parts = [dataset.get(sequence) for sequence in dataset.document(document)]
    return tokenizer.decode([int(token) for part in parts for token in part])


def convert(prefix: str | os.PathLike[str], output_prefix: str | os.PathLike[str]) -> int:
    """Write a dataset in Megatron's old TNTIDX format anew; returns its number of sequences.

    The old ``.idx`` file, little endian: ``TNTIDX\\0\\0``; u64 version 1, dtype code, element size,
    N sequences, S sizes, D document entries; then i64 first size of each sequence [N + 1], first
    element of each sequence [N + 1], sizes [S], first sequence of each document [D].

    Raises:
        ValueError: not that format, cut off, or the output would replace the input.
    """
    index, data = idx_path(prefix), bin_path(prefix)
    if index.resolve() == idx_path(output_prefix).resolve():
        raise ValueError(f"{output_prefix} is the input; give the result another name")
    if not index.is_file():
        raise FileNotFoundError(f"{index}: no such file")
    raw = index.read_bytes()
    header = struct.Struct("<8s6Q")
    if len(raw) < header.size or not raw.startswith(LEGACY_MAGIC):
        raise ValueError(f"{index}: not a TNTIDX index; only those need converting")
    _, version, code, width, num_sequences, num_sizes, num_entries = header.unpack_from(raw)
    dtype = np.dtype("<f8") if (code, width) == (7, 8) else DTYPES.get(code)
    if version != 1 or dtype is None or dtype.itemsize != width:
        raise ValueError(f"{index}: version {version}, dtype code {code} of {width} bytes")
    counts = (num_sequences + 1, num_sequences + 1, num_sizes, num_entries)
    if len(raw) < header.size + 8 * sum(counts):
        raise ValueError(
            f"{index}: {len(raw):,} bytes, {header.size + 8 * sum(counts):,} expected; cut off"
        )
    fields = np.frombuffer(raw, "<i8", sum(counts), header.size)
    first_size, offsets, sizes, documents = np.split(fields, np.cumsum(counts)[:-1])
    lengths = np.diff(offsets)
    if num_sizes != num_sequences or (np.diff(first_size) != 1).any() or (lengths != sizes).any():
        raise ValueError(f"{index}: holds arrays of several dimensions, not token sequences")
    if data.stat().st_size < int(offsets[-1]) * width:
        raise ValueError(
            f"{data}: {data.stat().st_size:,} bytes, its index needs {int(offsets[-1]) * width:,}"
        )
    if num_entries == 0 or documents[0] != 0 or documents[-1] != num_sequences:
        raise ValueError(f"{index}: document boundaries must run from 0 to {num_sequences}")
    with IndexedDatasetBuilder(output_prefix, dtype) as builder:
        if int(offsets[-1]):
            tokens = np.memmap(data, dtype, "r", shape=(int(offsets[-1]),))
        else:
            tokens = np.zeros(0, dtype)
        builder.add_documents(tokens, sizes, np.diff(documents))
    return num_sequences


def _tokens_outside(dataset: IndexedDataset, vocab_size: int) -> list[str]:
    for start in range(0, len(dataset.tokens), CHUNK):
        part = dataset.tokens[start : start + CHUNK]
        # "Not inside" instead of "outside": of tokens in floating point some may be no numbers.
        if not (part.min() >= 0 and part.max() < vocab_size):
            where = start + int((~((part >= 0) & (part < vocab_size))).argmax())
            byte = where * dataset.dtype.itemsize
            sequence = int(np.searchsorted(dataset.pointers, byte, side="right")) - 1
            return [
                f"{bin_path(dataset.prefix)}: token {dataset.tokens[where]} in sequence "
                f"{sequence}, the vocabulary has {vocab_size:,} ids"
            ]
    return []
