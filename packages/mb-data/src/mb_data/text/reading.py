"""Input files in blocks of whole documents, whatever their number, size, format or compression.

Plain files are described as byte ranges and Parquet files as row groups, which the workers read
themselves. What can only be read from start to end (compressed files, pipes, standard input, object
stores) is read here and sent as bytes; if there are many compressed files, each worker unpacks its
own. A line belongs to the block that holds its first byte, so blocks depend only on the file and
``block_bytes``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from mb_data.system import naming
from mb_data.text.compression import decoding_errors, decompress
from mb_data.text.parquet import row_groups
from mb_data.text.sources import STDIN, Source, open_remote, reached

PIECE = 1 << 18  # bytes read at a time
# Of what is too long so much beyond the limit is kept: a byte order mark, which does not count, and
# one byte more. Else a file with such a mark, cut at the limit, would pass for one that fits.
BEYOND = 4
# Workers unpack whole compressed files by themselves if none is more than this share of all.
# Otherwise one process unpacks for all: the largest file would keep one worker busy when the others
# have nothing left. The rule does not depend on the number of workers, so another number of them
# may resume the run.
LARGEST_SHARE = 1 / 3


class Block(NamedTuple):
    """Whole documents of one source: a byte range of a plain file, row groups of a Parquet file
    (``start`` and ``stop`` count those), or ``data`` itself.

    ``position`` counts bytes on disk read so far over all sources, for the progress bar.
    ``problem`` says why the source has no more to give.
    """

    path: str
    start: int
    stop: int
    data: bytes | None
    position: int
    unit: str = "json"
    problem: str | None = None


class Archive(NamedTuple):
    """A compressed file for a worker to unpack; ``before`` bytes on disk are before it."""

    source: Source
    before: int
    block_bytes: int
    max_line_bytes: int

    def blocks(self) -> Iterator[Block]:
        return _stream_blocks(self.source, self.block_bytes, self.max_line_bytes, self.before)


def blocks(
    sources: Sequence[Source],
    block_bytes: int,
    max_line_bytes: int,
    *,
    mine: Callable[[int], bool] = lambda _: True,
) -> Iterator[Block | Archive]:
    """All documents of all sources, in order; compressed files as archives if none of them is
    large, see ``LARGEST_SHARE``.

    Args:
        mine: whether to read a part, given the position of its first byte in all sources laid end
            to end. A source that can only be read as a whole is one part.
    """
    befores = [0, *accumulate(source.size for source in sources)]
    packed = [s.size for s, at in zip(sources, befores, strict=False) if s.packed and mine(at)]
    apart = max(packed, default=0) <= LARGEST_SHARE * sum(packed)
    before = 0
    for source in sources:
        if source.unit == "parquet":
            count = row_groups(source.path)
            for group in range(count):
                if mine(before + source.size * group // count):
                    position = before + source.size * (group + 1) // count
                    yield Block(source.path, group, group + 1, None, position, source.unit)
        elif source.seekable and source.unit == "file":
            if mine(before) and source.size:
                yield Block(source.path, 0, source.size, None, before + source.size, source.unit)
        elif source.seekable:
            for start in range(0, source.size, block_bytes):
                stop = min(start + block_bytes, source.size)
                if mine(before + start):
                    yield Block(source.path, start, stop, None, before + stop, source.unit)
        elif mine(before):
            archive = Archive(source, before, block_bytes, max_line_bytes)
            yield from [archive] if apart and source.packed else archive.blocks()
        before += source.size


def read_lines(block: Block, max_line_bytes: int) -> list[memoryview]:
    """The lines of a block, without newlines. One beyond ``max_line_bytes`` may be cut, but stays
    longer than that. They are views: copying all lines would cost as much as parsing them."""
    if block.data is not None:
        return [memoryview(block.data)] if block.unit == "file" else _split(block.data)
    # Reads of a buffered file are never short, as a raw one's may be.
    with naming(block.path), open(block.path, "rb") as file:
        if block.unit == "file":
            return [memoryview(file.read(min(block.stop, max_line_bytes + BEYOND)))]
        whole = True
        if block.start:
            file.seek(block.start - 1)
            whole = file.read(1) == b"\n"
        data = file.read(block.stop - block.start)
        lines = _split(data)
        if not whole:
            del lines[:1]  # began in an earlier block
        if not lines or data.endswith(b"\n"):
            return lines
        parts, offset, limit = [lines[-1]], block.stop, block.stop + max_line_bytes
        while offset <= limit and (part := file.read(PIECE)):
            end = part.find(b"\n")
            parts.append(memoryview(part)[:end] if end >= 0 else memoryview(part))
            if end >= 0:
                break
            offset += len(part)
        lines[-1] = memoryview(b"".join(parts))
        return lines


def count_lines(path: str, stop: int) -> int:
    """Lines that start in the first ``stop`` bytes of a plain file, ``stop`` at least 1."""
    count = 1
    stop -= 1  # a newline that is the last of them starts none
    with naming(path), open(path, "rb") as file:
        while stop > 0 and (data := file.read(min(stop, 1 << 24))):
            count += data.count(b"\n")
            stop -= len(data)
    return count


def _split(data: bytes) -> list[memoryview]:
    view, lines, start = memoryview(data), [], 0
    while (end := data.find(b"\n", start)) >= 0:
        lines.append(view[start:end])
        start = end + 1
    if start < len(data):
        lines.append(view[start:])
    return lines


def _stream_blocks(
    source: Source, block_bytes: int, max_line_bytes: int, before: int
) -> Iterator[Block]:
    whole_file = source.unit == "file"
    limit = max_line_bytes + BEYOND if whole_file else block_bytes
    with naming(source.path), contextlib.ExitStack() as stack:
        with reached(source.path):
            raw = _open(source, stack)
            kind, file = decompress(raw, source.path)
        damage = (EOFError, *decoding_errors(kind))
        offset = 0
        while True:
            data, problem = bytearray(), None
            try:
                # One step of unpacking at a time: where an archive breaks off, all before is kept.
                while len(data) < limit and (piece := file.read1(min(PIECE, limit - len(data)))):
                    data += piece
                if data and not whole_file and not data.endswith(b"\n"):
                    data += _rest_of_line(file, max_line_bytes)
            except damage as error:
                if isinstance(error, EOFError):
                    _check_all_came(source, raw)
                end = 0 if whole_file else data.rfind(b"\n") + 1
                del data[end:]
                problem = (
                    f"damaged {kind} data after {offset + end:,} bytes of text: {error}; "
                    "the rest of the file is left out"
                )
            except Exception as error:  # a connection that broke: what follows is no bad line
                if not source.remote:
                    raise
                raise OSError(f"{source.path}: {type(error).__name__}: {error}") from error
            if len(data) < limit and not problem:  # the end
                _check_all_came(source, raw)
            position = before if not source.size else before + min(raw.tell(), source.size)
            path, unit = source.path, source.unit
            if data:
                yield Block(path, offset, offset + len(data), bytes(data), position, unit)
            offset += len(data)
            if problem:
                yield Block(path, offset, offset, b"", position, unit, problem)
            if problem or not data or whole_file:
                return


def _check_all_came(source: Source, raw: io.BufferedReader) -> None:
    """Raise OSError where a store's file ended early."""
    if source.remote and raw.tell() < source.size:
        have = f"{raw.tell():,} of {source.size:,} bytes"
        raise OSError(f"{source.path}: the connection ended after {have}")


def _open(source: Source, stack: contextlib.ExitStack) -> io.BufferedReader:
    if source.path == STDIN:
        return cast(io.BufferedReader, sys.stdin.buffer)
    if source.remote:
        return stack.enter_context(open_remote(source.path))
    return stack.enter_context(open(source.path, "rb"))


def _rest_of_line(file: io.BufferedIOBase, limit: int) -> bytes:
    """Up to the line's end; of a line beyond the limit, a little more than the limit."""
    rest = file.readline(limit + BEYOND)
    if len(rest) > limit and not rest.endswith(b"\n"):
        while (more := file.readline(1 << 20)) and not more.endswith(b"\n"):
            pass
        rest += b"\n"
    return rest
