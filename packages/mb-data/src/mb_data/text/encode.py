"""From a block of lines to tokens: what a worker process does, as a function of the block alone.

Every line is a JSON object. A bad line (broken JSON, invalid UTF-8, a missing key, a value that is
not text, a line beyond the limit) becomes an entry in ``errors``, and all its keys are left out. In
each block one document is encoded a second time, by the tokenizer's readable twin, and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.text.reading import Block, DamagedParquetError, parquet_columns, read_lines
from mb_data.text.sentences import SentenceSplitter
from mb_data.tokenizer import Tokenizer

try:
    from orjson import loads as fast_loads
except ModuleNotFoundError:

    def fast_loads(line: memoryview) -> Any:  # json would guess at other encodings of bytes
        return json.loads(str(line, "utf-8"))


CHECKED_LETTERS = 512  # of one document a block: some 0.3 ms of 25
MAX_ERRORS = 100  # a block names so many bad lines one by one, the rest as a range
MAX_MESSAGE = 200


@dataclass(frozen=True)
class Job:
    """What to do with every block.

    ``keys`` are the values of each line's object to encode, ``splitter`` cuts them into sentences.
    ``bos`` is the token that begins each document, if any. With ``keep_empty`` a text without
    tokens is a document of no sequence.
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    bos: int | None
    dtype: np.dtype
    max_line_bytes: int
    splitter: SentenceSplitter | None = None
    keep_empty: bool = False


class Tokens(NamedTuple):
    """Documents of one key: S sequences in D documents, in order.

    Those without tokens are gone, unless the job keeps them.
    """

    tokens: npt.NDArray  # [n], in the job's dtype
    sizes: npt.NDArray[np.int32]  # [S]
    counts: npt.NDArray[np.int32]  # [D], sequences of each document; empty if all have one
    documents: int
    empty: int
    text_bytes: int


class Encoded(NamedTuple):
    """A block's documents by key, its number of lines, and what was wrong with some.

    ``errors`` holds (first line, last line, message), lines counted from 0 within the block.
    ``fatal`` is the line and message of a document on which two implementations disagree.
    ``careful`` counts documents that the tokenizer left to its readable twin.
    """

    keys: list[Tokens]
    lines: int
    bad_lines: int
    errors: list[tuple[int, int, str]]
    fatal: tuple[int, str] | None
    careful: int = 0


def encode_block(job: Job, block: Block) -> Encoded:
    """Parse and encode all documents of a block."""
    careful = job.tokenizer.careful_documents
    problems = Problems()
    columns, numbers, count = _read(job, block, problems)
    try:
        encoded = [_encode(job, texts) for texts in columns]
    except ValueError:
        columns, numbers = _without_refused(job, columns, numbers, problems)
        encoded = [_encode(job, texts) for texts in columns]
    careful = job.tokenizer.careful_documents - careful
    fatal = None
    for key, texts, (_, unit) in zip(job.keys, columns, encoded, strict=True):
        if texts and not fatal:
            row = (block.start >> 10) * 2_654_435_761 % len(texts)  # any, but always the same
            difference = _compare(job, *unit(row))
            if difference:
                fatal = numbers[row], f"{key!r}: {difference}"
    keys = [tokens for tokens, _ in encoded]
    return Encoded(keys, count, problems.count, sorted(problems.errors), fatal, careful)


def _read(
    job: Job, block: Block, problems: Problems
) -> tuple[list[list[bytes]], Sequence[int], int]:
    """The good texts of each key, the numbers of their lines, and how many lines there are."""
    if block.problem:
        problems.add(0, block.problem)
        return [[] for _ in job.keys], [], 0
    if block.unit == "parquet":
        return _rows(job, block, problems)
    lines = read_lines(block, job.max_line_bytes)
    if block.start == 0 and lines and lines[0][:3] == b"\xef\xbb\xbf":  # a byte order mark
        lines[0] = lines[0][3:]
    if block.unit == "json":
        try:
            return _columns(job, lines), range(len(lines)), len(lines)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
    columns, numbers = _careful_columns(job, block, lines, problems)
    return columns, numbers, len(lines)


def _rows(
    job: Job, block: Block, problems: Problems
) -> tuple[list[list[bytes]], Sequence[int], int]:
    try:
        columns = parquet_columns(block, job.keys)
    except DamagedParquetError as error:
        problems.add(0, str(error))
        return [[] for _ in job.keys], [], error.rows
    texts: list[list[bytes]] = [[] for _ in job.keys]
    good: list[int] = []
    for number, row in enumerate(zip(*columns, strict=True)):
        if None in row:
            problems.add(number, f"the value of {job.keys[row.index(None)]!r} is null")
            continue
        values = [value.encode() for value in row]
        if max(map(len, values)) > job.max_line_bytes:
            problems.add(number, _too_long(job))
            continue
        good.append(number)
        for column, value in zip(texts, values, strict=True):
            column.append(value)
    return texts, good, len(columns[0])


class Problems:
    """Bad lines of a block: the first ones by themselves, the rest as ranges."""

    def __init__(self) -> None:
        self.count = 0
        self.errors: list[tuple[int, int, str]] = []

    def add(self, number: int, message: str) -> None:
        self.count += 1
        if self.count <= MAX_ERRORS:
            self.errors.append((number, number, message[:MAX_MESSAGE]))
            return
        first = self.errors.pop()[0] if self.count > MAX_ERRORS + 1 else number
        more = f"{self.count - MAX_ERRORS:,} more bad lines among these"
        self.errors.append((first, number, more))


def _columns(job: Job, lines: list[memoryview]) -> list[list[bytes]]:
    """The texts of each key, if every line is as it should be; raises whatever comes otherwise."""
    if sum(map(len, lines)) > job.max_line_bytes and max(map(len, lines)) > job.max_line_bytes:
        raise ValueError
    if len(job.keys) == 1:
        key = job.keys[0]
        return [[fast_loads(line)[key].encode() for line in lines]]
    records = [fast_loads(line) for line in lines]
    return [[record[key].encode() for record in records] for key in job.keys]


def _careful_columns(
    job: Job, block: Block, lines: list[memoryview], problems: Problems
) -> tuple[list[list[bytes]], list[int]]:
    """The same, line by line, with the numbers of the good lines; bad lines become problems."""
    columns: list[list[bytes]] = [[] for _ in job.keys]
    numbers: list[int] = []
    for number, line in enumerate(lines):
        if not line or bytes(line).isspace():
            continue
        try:
            values = _values(job, line) if block.unit == "json" else [_plain(job, line)]
        except (ValueError, RecursionError) as error:
            problems.add(number, str(error))
            continue
        numbers.append(number)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns, numbers


def _without_refused(
    job: Job, columns: list[list[bytes]], numbers: Sequence[int], problems: Problems
) -> tuple[list[list[bytes]], list[int]]:
    """Without the documents that the tokenizer itself refuses; those become problems."""
    kept = []
    for row, texts in enumerate(zip(*columns, strict=True)):
        try:
            for text in texts:
                _encode(job, [text])
            kept.append(row)
        except ValueError as error:
            problems.add(numbers[row], str(error))
    return [[column[row] for row in kept] for column in columns], [numbers[row] for row in kept]


def _values(job: Job, line: memoryview) -> list[bytes]:
    if len(line) > job.max_line_bytes:
        raise ValueError(_too_long(job))
    start = bytes(line[:100]).lstrip()[:1]
    try:
        # Python refuses numbers of thousands of digits. Numbers do not matter here.
        record = json.loads(str(line, "utf-8"), parse_int=lambda _: 0)
    except json.JSONDecodeError as error:
        if bytes(line[:100]).strip() == start == b"{":
            raise ValueError(f"{error}; make each object one line: jq -c .") from error
        if start == b"[":
            raise ValueError(f"{error}; of a JSON array make lines: jq -c '.[]'") from error
        if start != b"{":
            raise ValueError(f"{error}; plain text is read from files named .txt") from error
        raise
    if not isinstance(record, dict):
        hint = "; of a JSON array make lines: jq -c '.[]'" if isinstance(record, list) else ""
        raise ValueError(f"expected a JSON object, got {type(record).__name__}{hint}")
    values = []
    for key in job.keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; the keys are {', '.join(record) or 'none'}")
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise ValueError(f"the value of {key!r} must be text, got {kind}")
        values.append(record[key].encode())
    return values


def _plain(job: Job, line: memoryview) -> bytes:
    """A document of plain text as it stands, if it is UTF-8."""
    if len(line) > job.max_line_bytes:
        raise ValueError(_too_long(job))
    text = bytes(line)
    text.decode()
    return text.removesuffix(b"\r")


def _too_long(job: Job) -> str:
    return (
        f"longer than {job.max_line_bytes:,} bytes, the limit that bounds memory; "
        "raise --max-line-mb or cut the document"
    )


Unit = tuple[bytes, npt.NDArray]


def _encode(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Tokens of some documents; and a function giving one document's first text and tokens."""
    return _encode_whole(job, texts) if job.splitter is None else _encode_split(job, texts)


def _encode_whole(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Encode each document as one sequence."""
    append = job.append_eod and job.bos is None  # beside a bos it is _framed's
    tokens, lengths = job.tokenizer.encode_documents(texts, append_eod=append)
    starts = lengths.cumsum() - lengths
    sizes = lengths[lengths > 0]
    framed = tokens
    if job.bos is not None:
        framed, sizes = _framed(job, tokens, sizes, np.ones(len(sizes), dtype=np.int64))

    def text(row: int) -> Unit:
        start, size = int(starts[row]), int(lengths[row])
        return texts[row], tokens[start : start + size - (append and size > 0)]

    counts = (lengths > 0) if job.keep_empty else np.zeros(0)
    done = Tokens(
        framed.astype(job.dtype, copy=False),
        sizes.astype(np.int32),
        counts=counts.astype(np.int32),
        documents=len(texts) if job.keep_empty else len(sizes),
        empty=len(texts) - len(sizes),
        text_bytes=sum(map(len, texts)),
    )
    return done, text


def _encode_split(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Encode each sentence of a document as a sequence."""
    assert job.splitter is not None
    split = [job.splitter(text.decode()) for text in texts]
    sentences = [sentence.encode() for document in split for sentence in document]
    tokens, lengths = job.tokenizer.encode_documents(sentences)
    starts = lengths.cumsum() - lengths
    document_of = np.repeat(np.arange(len(texts)), [len(document) for document in split])
    kept = lengths > 0
    counts = np.bincount(document_of[kept], minlength=len(texts))
    full = counts[counts > 0]
    framed, sizes = _framed(job, tokens, lengths[kept], full)
    if not job.keep_empty:
        counts = full

    def first_sentence(row: int) -> Unit:
        sentence = int(np.searchsorted(document_of, row))
        if sentence == len(document_of) or document_of[sentence] != row:
            return b"", tokens[:0]
        start = int(starts[sentence])
        return sentences[sentence], tokens[start : start + int(lengths[sentence])]

    done = Tokens(
        framed.astype(job.dtype, copy=False),
        sizes.astype(np.int32),
        counts=counts.astype(np.int32),
        documents=len(counts),
        empty=len(texts) - len(full),
        text_bytes=sum(map(len, texts)),
    )
    return done, first_sentence


def _framed(
    job: Job, tokens: npt.NDArray, sizes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray, npt.NDArray[np.int64]]:
    """Tokens with those that begin and end each document, in its first and last sequence.

    Args:
        sizes: of all sequences; counts: sequences of each document.
    """
    last = counts.cumsum() - 1
    first = last + 1 - counts
    ends = sizes.cumsum()
    starts = ends - sizes
    sizes = sizes.copy()
    where, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=tokens.dtype)]
    # The end of a document before the start of the next one, which is the same place.
    if job.append_eod:
        where.append(ends[last])
        values.append(np.full(len(last), job.tokenizer.eod, dtype=tokens.dtype))
        sizes[last] += 1
    if job.bos is not None:
        where.append(starts[first])
        values.append(np.full(len(first), job.bos, dtype=tokens.dtype))
        sizes[first] += 1
    return np.insert(tokens, np.concatenate(where), np.concatenate(values)), sizes


def _compare(job: Job, text: bytes, tokens: npt.NDArray) -> str | None:
    """What differs between a text's tokens and those of the tokenizer's twin, if anything."""
    letters = text.decode()
    expected = job.tokenizer.reference_start(letters, CHECKED_LETTERS)
    if expected is None:
        return None
    got = (tokens if len(letters) <= CHECKED_LETTERS else tokens[: len(expected)]).tolist()
    if got == expected:
        return None
    pairs = zip(got, expected, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    offset = len(job.tokenizer.decode(expected[:place]))
    return (
        f"the engine and its readable twin differ at token {place}, letter {offset}: "
        f"{got[place : place + 3]} and {expected[place : place + 3]} for "
        f"{letters[offset : offset + 20]!r}; please report it, and use --engine python meanwhile"
    )
