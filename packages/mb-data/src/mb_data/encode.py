"""From a block of lines to tokens: what a worker process does, as a function of the block alone.

Every line is a JSON object. A bad one, broken JSON, invalid UTF-8, a missing key, a value that is
no text, a line beyond the limit, becomes an entry in ``errors``; all its keys are left out. In
each block one document is encoded a second time, by the tokenizer's readable twin, and compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mb_data.reading import Block, read_lines
from mb_data.sentences import SentenceSplitter
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
    """

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append_eod: bool
    dtype: np.dtype
    max_line_bytes: int
    splitter: SentenceSplitter | None = None


class Tokens(NamedTuple):
    """Documents of one key: S sequences in D documents, in order, documents without tokens gone."""

    tokens: npt.NDArray  # [n], in the job's dtype
    sizes: npt.NDArray[np.int32]  # [S]
    counts: npt.NDArray[np.int32]  # [D], sequences of each document; empty if none was split
    documents: int
    empty: int
    text_bytes: int


class Encoded(NamedTuple):
    """A block's documents by key, its number of lines, and what was wrong with some.

    ``errors`` holds (first line, last line, message), lines counted from 0 within the block;
    ``fatal`` the line and message of a document that two implementations disagree on.
    """

    keys: list[Tokens]
    lines: int
    bad_lines: int
    errors: list[tuple[int, int, str]]
    fatal: tuple[int, str] | None


def encode_block(job: Job, block: Block) -> Encoded:
    """Parse and encode all lines of a block."""
    lines = read_lines(block, job.max_line_bytes)
    if block.start == 0 and lines and lines[0][:3] == b"\xef\xbb\xbf":  # a byte order mark
        lines[0] = lines[0][3:]
    number_of_lines = len(lines)
    numbers: Sequence[int] = range(number_of_lines)
    problems = Problems()
    try:
        columns = _columns(job, lines)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        columns, numbers = _careful_columns(job, lines, problems)
    del lines
    try:
        encoded = [_encode(job, texts) for texts in columns]
    except ValueError:
        columns, numbers = _without_refused(job, columns, numbers, problems)
        encoded = [_encode(job, texts) for texts in columns]
    fatal = None
    for key, texts, (_, unit) in zip(job.keys, columns, encoded, strict=True):
        if texts and not fatal:
            row = (block.start >> 10) * 2_654_435_761 % len(texts)  # any, but always the same
            difference = _compare(job, *unit(row))
            if difference:
                fatal = numbers[row], f"{key!r}: {difference}"
    keys = [tokens for tokens, _ in encoded]
    return Encoded(keys, number_of_lines, problems.count, sorted(problems.errors), fatal)


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
    job: Job, lines: list[memoryview], problems: Problems
) -> tuple[list[list[bytes]], list[int]]:
    """The same line by line, with the numbers of the good lines; the bad become problems."""
    columns: list[list[bytes]] = [[] for _ in job.keys]
    numbers: list[int] = []
    for number, line in enumerate(lines):
        if not line or bytes(line).isspace():
            continue
        try:
            values = _values(job, line)
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
        raise ValueError(
            f"longer than {job.max_line_bytes:,} bytes, the limit that bounds memory; "
            "raise --max-line-mb or cut the document"
        )
    record = json.loads(str(line, "utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    values = []
    for key in job.keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; the keys are {', '.join(record) or 'none'}")
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise ValueError(f"the value of {key!r} must be text, got {kind}")
        values.append(record[key].encode())
    return values


Unit = tuple[bytes, npt.NDArray]


def _encode(job: Job, texts: list[bytes]) -> tuple[Tokens, Callable[[int], Unit]]:
    """Tokens of some documents; and a function giving one document's first text and tokens."""
    text_bytes = sum(map(len, texts))
    if job.splitter is None:
        tokens, lengths = job.tokenizer.encode_documents(texts, append_eod=job.append_eod)
        tokens = tokens.astype(job.dtype, copy=False)
        sizes = lengths[lengths > 0].astype(np.int32)
        empty = len(texts) - len(sizes)
        none = np.zeros(0, dtype=np.int32)

        def unit(row: int) -> Unit:
            start = int(lengths[:row].sum())
            return texts[row], tokens[start : start + int(lengths[row])]

        return Tokens(tokens, sizes, none, len(sizes), empty, text_bytes), unit

    split = [job.splitter(text.decode()) for text in texts]
    sentences = [sentence.encode() for document in split for sentence in document]
    tokens, lengths = job.tokenizer.encode_documents(sentences)
    document_of = np.repeat(np.arange(len(texts)), [len(document) for document in split])
    kept = lengths > 0
    counts = np.bincount(document_of[kept], minlength=len(texts))
    sizes, counts = lengths[kept], counts[counts > 0]
    if job.append_eod:  # a part of each document's last sentence
        tokens = np.insert(tokens, sizes.cumsum()[counts.cumsum() - 1], job.tokenizer.eod)
        sizes[counts.cumsum() - 1] += 1
    done = Tokens(
        tokens.astype(job.dtype, copy=False),
        sizes.astype(np.int32),
        counts.astype(np.int32),
        len(counts),
        len(texts) - len(counts),
        text_bytes,
    )

    def first_sentence(row: int) -> Unit:
        sentence = int(np.searchsorted(document_of, row))
        if sentence == len(document_of) or document_of[sentence] != row:
            return b"", tokens[:0]
        index = int(kept[:sentence].sum())
        start = int(sizes[:index].sum())
        return sentences[sentence], done.tokens[start : start + int(lengths[sentence])]

    return done, first_sentence


def _compare(job: Job, text: bytes, tokens: npt.NDArray) -> str | None:
    """What differs between a text's tokens and those of the tokenizer's twin, if anything."""
    letters = text.decode()
    expected = job.tokenizer.reference_start(letters, CHECKED_LETTERS)
    if expected is None:
        return None
    got = tokens[: len(expected)].tolist()
    if len(letters) <= CHECKED_LETTERS and not (job.append_eod and job.splitter is None):
        got = tokens.tolist()
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
