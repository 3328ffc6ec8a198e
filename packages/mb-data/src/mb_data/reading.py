"""Input files in blocks of whole lines, whatever their number, size or compression.

Plain files are described as byte ranges, which the workers read themselves; compressed files and
standard input are read here and travel as bytes. A line belongs to the block its first byte lies
in, so blocks depend on nothing but the file and ``block_bytes``.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

STDIN = "-"
MAGIC_NUMBERS = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\x00": "xz"}
KINDS = (".jsonl", ".json", ".ndjson")
SUFFIXES = tuple(kind + packing for kind in KINDS for packing in ("", ".gz", ".zst", ".xz"))


@dataclass(frozen=True)
class Source:
    """One input: its path ("-" for standard input), bytes on disk, time of change, compression."""

    path: str
    size: int
    modified_ns: int
    compression: str | None

    @property
    def seekable(self) -> bool:
        """Workers can read parts of it by themselves."""
        return self.path != STDIN and self.compression is None


class Block(NamedTuple):
    """Whole lines of one source: a byte range of a plain file, or ``data`` itself.

    ``position`` counts bytes on disk read so far over all sources, for the progress bar.
    """

    path: str
    start: int
    stop: int
    data: bytes | None
    position: int


def find_sources(inputs: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """Files, patterns, directories and "-" as a list of sources, each group in sorted order.

    A directory stands for its ``.jsonl``, ``.json`` and ``.ndjson`` files, compressed or not, at
    any depth. Raises FileNotFoundError for what matches nothing, ValueError for "-" twice.
    """
    paths: list[str] = []
    for path in inputs:
        item = os.fspath(path)
        if item == STDIN or os.path.isfile(item):
            paths.append(item)
        elif os.path.isdir(item):
            inside = sorted(str(p) for p in Path(item).rglob("*") if p.name.endswith(SUFFIXES))
            if not inside:
                raise FileNotFoundError(f"{item}: no {', '.join(KINDS)} file inside")
            paths += inside
        else:
            matches = sorted(p for p in glob.glob(item, recursive=True) if os.path.isfile(p))
            if not matches:
                if os.path.exists(item):
                    raise ValueError(f"{item}: no regular file; pipe it into standard input (-)")
                kind = "no file matches" if glob.has_magic(item) else "no such file"
                raise FileNotFoundError(f"{item}: {kind}")
            paths += matches
    if not paths:
        raise ValueError("no input given")
    if paths.count(STDIN) > 1:
        raise ValueError("standard input (-) can be read only once")
    return [_describe(path) for path in paths]


def blocks(sources: Sequence[Source], block_bytes: int, max_line_bytes: int) -> Iterator[Block]:
    """All lines of all sources, in order."""
    before = 0
    for source in sources:
        if source.seekable:
            for start in range(0, source.size, block_bytes):
                stop = min(start + block_bytes, source.size)
                yield Block(source.path, start, stop, None, before + stop)
        else:
            yield from _stream_blocks(source, block_bytes, max_line_bytes, before)
        before += source.size


def read_lines(block: Block, max_line_bytes: int) -> list[memoryview]:
    """The lines of a block, without newlines; one beyond ``max_line_bytes`` may be cut, but is
    longer than that. Views, as copies of all lines would cost as much as parsing them."""
    if block.data is not None:
        return _split(block.data)
    with open(block.path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), block.stop - block.start, block.start)
        lines = _split(data)
        if block.start and os.pread(file.fileno(), 1, block.start - 1) != b"\n":
            del lines[:1]  # began in an earlier block
        if not lines or data.endswith(b"\n"):
            return lines
        parts, offset, limit = [lines[-1]], block.stop, block.stop + max_line_bytes
        while offset <= limit and (part := os.pread(file.fileno(), 1 << 16, offset)):
            end = part.find(b"\n")
            parts.append(memoryview(part)[:end] if end >= 0 else memoryview(part))
            if end >= 0:
                break
            offset += len(part)
        lines[-1] = memoryview(b"".join(parts))
        return lines


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
    with contextlib.ExitStack() as stack:
        if source.path == STDIN:
            raw = sys.stdin.buffer
        else:
            raw = stack.enter_context(open(source.path, "rb"))
        file = _decompress(cast(BinaryIO, raw), source)
        offset = 0
        while True:
            try:
                data = file.read(block_bytes)
                if data and not data.endswith(b"\n"):
                    data += _rest_of_line(file, max_line_bytes)
            except (EOFError, OSError, *_decoding_errors(source)) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise ValueError(
                    f"{source.path}: damaged {source.compression} data after "
                    f"{offset:,} bytes of text: {error}"
                ) from error
            if not data:
                return
            position = before if source.path == STDIN else before + raw.tell()
            yield Block(source.path, offset, offset + len(data), data, position)
            offset += len(data)


def _rest_of_line(file: BinaryIO, limit: int) -> bytes:
    """Up to the line's end; of a line beyond the limit, a little more than the limit."""
    rest = file.readline(limit + 1)
    if len(rest) > limit and not rest.endswith(b"\n"):
        while (more := file.readline(1 << 20)) and not more.endswith(b"\n"):
            pass
        rest += b"\n"
    return rest


def _describe(path: str) -> Source:
    if path == STDIN:
        start = cast(io.BufferedReader, sys.stdin.buffer).peek(8)
        return Source(path, 0, 0, _compression(start))
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        return Source(path, status.st_size, status.st_mtime_ns, _compression(file.read(8)))


def _compression(start: bytes) -> str | None:
    return next((kind for magic, kind in MAGIC_NUMBERS.items() if start.startswith(magic)), None)


def _decompress(raw: BinaryIO, source: Source) -> BinaryIO:
    match source.compression:
        case "gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        case "xz":
            import lzma

            return cast(BinaryIO, lzma.LZMAFile(raw))
        case "zst":
            return _zstd(source.path).ZstdFile(raw)
    return raw


def _decoding_errors(source: Source) -> tuple[type[Exception], ...]:
    match source.compression:
        case "gz":
            import zlib

            return (zlib.error,)
        case "xz":
            import lzma

            return (lzma.LZMAError,)
        case "zst":
            return (_zstd(source.path).ZstdError,)
    return ()


def _zstd(path: str) -> Any:
    """Zstandard is in the standard library from Python 3.14 on; its backport has the same API."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is compressed with Zstandard: pip install 'mb-data[zstd]'", name=name
        ) from error
