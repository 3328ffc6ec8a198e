"""From a block to the texts of its documents.

A line is a JSON object, or in plain text a document by itself. A bad line (broken JSON, invalid
UTF-8, a missing key, a value that is not text, a line beyond the limit) becomes a problem, and all
its keys are left out. Blocks without one take a fast path, and all others are read line by line.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mb_data.text.parquet import DamagedParquetError, read_columns
from mb_data.text.reading import Block, read_lines

try:
    from orjson import loads as fast_loads
except ModuleNotFoundError:

    def fast_loads(line: memoryview) -> Any:  # json would guess at other encodings of bytes
        return json.loads(str(line, "utf-8"))


MAX_ERRORS = 100  # a block names so many bad lines one by one, the rest as a range
MAX_MESSAGE = 200
ARRAY_TO_LINES = "of a JSON array make lines: jq -c '.[]'"


class Texts(NamedTuple):
    """The good documents of a block."""

    columns: list[list[bytes]]  # the texts of each key
    numbers: Sequence[int]  # of the documents' lines, counted from 0 within the block
    lines: int  # of the block, bad and blank ones too


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


def parse_block(
    block: Block, keys: Sequence[str], max_line_bytes: int, problems: Problems
) -> Texts:
    """The values of some keys in all lines of a block; what is wrong is added to ``problems``."""
    if block.problem:
        problems.add(0, block.problem)
        return Texts([[] for _ in keys], [], 0)
    if block.unit == "parquet":
        return _rows(block, keys, max_line_bytes, problems)
    lines = read_lines(block, max_line_bytes)
    if block.start == 0 and lines and lines[0][:3] == b"\xef\xbb\xbf":  # a byte order mark
        lines[0] = lines[0][3:]
    if block.unit == "json":
        try:
            return Texts(_columns(lines, keys, max_line_bytes), range(len(lines)), len(lines))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
    columns: list[list[bytes]] = [[] for _ in keys]
    numbers: list[int] = []
    for number, line in enumerate(lines):
        if not line or bytes(line).isspace():
            continue
        try:
            if len(line) > max_line_bytes:
                raise ValueError(_too_long(max_line_bytes))
            values = _values(line, keys) if block.unit == "json" else [_plain(line)]
        except (ValueError, RecursionError) as error:
            problems.add(number, str(error))
            continue
        numbers.append(number)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return Texts(columns, numbers, len(lines))


def _rows(block: Block, keys: Sequence[str], max_line_bytes: int, problems: Problems) -> Texts:
    """The same of row groups of a Parquet file."""
    columns: list[list[bytes]] = [[] for _ in keys]
    numbers: list[int] = []
    try:
        found = read_columns(block.path, range(block.start, block.stop), keys)
    except DamagedParquetError as error:
        problems.add(0, str(error))
        return Texts(columns, numbers, error.rows)
    for number, row in enumerate(zip(*found, strict=True)):
        if None in row:
            problems.add(number, f"the value of {keys[row.index(None)]!r} is null")
            continue
        values = [value.encode() for value in row]
        if max(map(len, values)) > max_line_bytes:
            problems.add(number, _too_long(max_line_bytes))
            continue
        numbers.append(number)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return Texts(columns, numbers, len(found[0]))


def _columns(
    lines: list[memoryview], keys: Sequence[str], max_line_bytes: int
) -> list[list[bytes]]:
    """The texts of each key, if every line is as it should be; raises whatever comes otherwise."""
    if sum(map(len, lines)) > max_line_bytes and max(map(len, lines)) > max_line_bytes:
        raise ValueError
    if len(keys) == 1:
        key = keys[0]
        return [[fast_loads(line)[key].encode() for line in lines]]
    records = [fast_loads(line) for line in lines]
    return [[record[key].encode() for record in records] for key in keys]


def _values(line: memoryview, keys: Sequence[str]) -> list[bytes]:
    """The texts of one line; raises ValueError that says what is wrong with it."""
    start = bytes(line[:100]).lstrip()[:1]
    try:
        record = _record(line)
    except json.JSONDecodeError as error:
        if bytes(line[:100]).strip() == start == b"{":
            raise ValueError(f"{error}; make each object one line: jq -c .") from error
        if start == b"[":
            raise ValueError(f"{error}; {ARRAY_TO_LINES}") from error
        if start != b"{":
            raise ValueError(f"{error}; plain text is read from files named .txt") from error
        raise
    if not isinstance(record, dict):
        hint = f"; {ARRAY_TO_LINES}" if isinstance(record, list) else ""
        raise ValueError(f"expected a JSON object, got {type(record).__name__}{hint}")
    values = []
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; the keys are {', '.join(record) or 'none'}")
        if not isinstance(record[key], str):
            kind = type(record[key]).__name__
            raise ValueError(f"the value of {key!r} must be text, got {kind}")
        values.append(record[key].encode())
    return values


def _record(line: memoryview) -> Any:
    """A line's JSON; raises ValueError, whose words are Python's."""
    with contextlib.suppress(ValueError):
        return fast_loads(line)  # which takes what is nested deeper: as if all lines were good
    # Python refuses numbers of thousands of digits. Numbers do not matter here.
    return json.loads(str(line, "utf-8"), parse_int=lambda _: 0)


def _plain(line: memoryview) -> bytes:
    """A document of plain text as it stands, if it is UTF-8."""
    text = bytes(line)
    text.decode()
    return text.removesuffix(b"\r")


def _too_long(max_line_bytes: int) -> str:
    return (
        f"longer than {max_line_bytes:,} bytes, the limit that bounds memory; "
        "raise --max-line-mb or cut the document"
    )
