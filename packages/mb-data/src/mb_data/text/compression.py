"""Compressed input, known by its first bytes: gzip, bzip2, xz and Zstandard."""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from mb_data.words import missing_package

MAGIC_NUMBERS = {
    b"\x1f\x8b": "gz",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zst",
    b"\xfd7zXZ\x00": "xz",
}
# Zstandard's frames that hold none of the data, with which seekable and parallel writers begin.
SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
START = 512  # bytes of a file that tell what it is


def compression(start: bytes) -> str | None:
    """The kind of a file that starts so, None if it is plain."""
    if SKIPPABLE.match(start):
        return "zst"
    return next((kind for magic, kind in MAGIC_NUMBERS.items() if start.startswith(magic)), None)


def decompress(raw: io.BufferedReader, path: str) -> tuple[str | None, io.BufferedIOBase]:
    """The kind of a stream, and a stream of its plain bytes.

    Raises ModuleNotFoundError where Zstandard's library is missing.
    """
    kind = compression(raw.peek(START)[:START])
    match kind:
        case "gz":
            import gzip

            return kind, cast(io.BufferedIOBase, gzip.GzipFile(fileobj=raw))
        case "bz2":
            import bz2

            return kind, io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor))
        case "xz":
            import lzma

            new = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)
            return kind, io.BufferedReader(_Streams(raw, new))
        case "zst":
            library = _zstd(path)
            # As far back as `zstd --long=31` looks, where a file says so: 2 GB of memory.
            window = {library.DecompressionParameter.window_log_max: 31}
            return kind, library.ZstdFile(raw, options=window)
    return kind, cast(io.BufferedIOBase, raw)


class _Streams(io.RawIOBase):
    """The text of a file of one or more bzip2 or xz streams, as ``cat`` and pbzip2 make them.

    BZ2File and LZMAFile take a damaged stream that is not the first one for an end of the file:
    all from there on would be left out without a word. Zeros after a stream are padding.
    """

    def __init__(self, raw: io.BufferedReader, new: Callable[[], Any]) -> None:
        self._raw = raw
        self._new = new
        self._stream = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        text = b""
        while not text:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed:
                    more = self._raw.read1()
                    if not more:
                        return 0
                    packed = more.lstrip(b"\0")
                self._stream = self._new()
            elif self._stream.needs_input:
                packed = self._raw.read1()
                if not packed:
                    raise EOFError("the file ends in the middle of its compressed data")
            try:
                text = self._stream.decompress(packed, len(buffer))
            except OSError as error:  # bz2's word for damage: those of the disk have a number
                raise ValueError(str(error)) from error
        buffer[: len(text)] = text
        return len(text)


def decoding_errors(kind: str | None) -> tuple[type[Exception], ...]:
    """What reading damaged data raises, besides EOFError: nothing that a disk or a store does."""
    match kind:
        case "gz":
            import gzip
            import zlib

            return (zlib.error, gzip.BadGzipFile)
        case "xz":
            import lzma

            return (lzma.LZMAError,)
        case "bz2":
            return (ValueError,)
        case "zst":
            return (_zstd("").ZstdError,)
    return ()


def _zstd(path: str) -> Any:
    """Zstandard is in the standard library from Python 3.14 on; its backport has the same API."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise missing_package(name, f"{path} is compressed with Zstandard", "zstd") from error
