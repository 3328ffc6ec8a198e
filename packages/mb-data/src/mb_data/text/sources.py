"""What there is to read: files, directories, patterns, pipes, standard input, object stores."""

from __future__ import annotations

import contextlib
import glob
import heapq
import io
import os
import re
import shlex
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mb_data.system import naming
from mb_data.text.compression import MAGIC_NUMBERS, START, compression
from mb_data.text.partial_output import is_unfinished
from mb_data.words import missing_package

STDIN = "-"
JSON_KINDS = (".jsonl", ".json", ".ndjson")
TEXT_KINDS = (".txt",)
PACKINGS = ("", *(f".{kind}" for kind in MAGIC_NUMBERS.values()))
PARQUET = ".parquet"
RECORDS = (*(kind + packing for kind in JSON_KINDS for packing in PACKINGS), PARQUET)
TEXTS = (*(kind + packing for kind in TEXT_KINDS for packing in PACKINGS),)
TEXT_UNITS = ("line", "file")
_SEPARATORS = re.escape(os.sep + (os.altsep or ""))
_ANY_DEPTH = re.compile(rf"(?:^|(?<=[{_SEPARATORS}]))\*\*(?:[{_SEPARATORS}]+|$)")


@dataclass(frozen=True)
class Source:
    """One input.

    Attributes:
        path: "-" for standard input, a URL for an object store.
        size: bytes on disk; 0 where that is not known (pipes).
        version: time of change in ns, or what a store calls a version.
        seekable: workers can read parts of it by themselves.
        unit: what a document is: a "json" line, a "line" of text, a "file", or a "parquet" row.
    """

    path: str
    size: int
    version: int | str
    seekable: bool
    unit: str

    @property
    def stream(self) -> bool:
        """It can be read only once."""
        return self.path == STDIN or (not self.remote and not self.size and not self.seekable)

    @property
    def packed(self) -> bool:
        """It is a compressed file on a disk of this machine."""
        return bool(self.size) and not self.seekable and not self.remote

    @property
    def remote(self) -> bool:
        return "://" in self.path


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], *, text_unit: str = "line"
) -> list[Source]:
    """Files, patterns, directories, pipes, URLs and "-" as sources, each group in sorted order.

    A directory stands for its ``.jsonl``, ``.json``, ``.ndjson`` (compressed or not) and
    ``.parquet`` files, or for its ``.txt`` files if it has none of them. They may be at any depth,
    also behind symbolic links to directories; each directory is read once. Unfinished output of
    runs is left out. What is named several times is read as often, with a warning.

    Raises:
        FileNotFoundError: for what matches nothing, and for a link inside a directory, or one that
            a pattern matches, to a file that is gone.
        PermissionError: a directory in it, or one below the ``**`` of a pattern, cannot be read.
        ValueError: "-" twice, or a file of a format that is not read here.
    """
    paths: list[str] = []
    for path in inputs:
        item = os.fspath(path)
        if "://" in item:
            with reached(item):
                paths += _find_remote(item)
        elif item == STDIN or (os.path.exists(item) and not os.path.isdir(item)):
            paths.append(item)
        elif os.path.isdir(item):
            found = _readable(sorted(str(Path(p)) for p in _files_inside(item)))
            if not found:
                kinds = ", ".join((*JSON_KINDS, *TEXT_KINDS, PARQUET))
                raise FileNotFoundError(f"{item}: no {kinds} file inside")
            paths += found
        else:
            matches = sorted(
                # A folder met again through a symbolic link is not read again. Of its names the
                # last counts: the shortest, of equally long ones the first by letters.
                {
                    (os.path.realpath(os.path.dirname(p)), os.path.basename(p)): p
                    for p in sorted(_matching(item), key=lambda p: (len(p), p), reverse=True)
                    if _is_file_or_gone(p) and not is_unfinished(os.path.dirname(p))
                }.values()
            )
            if not matches:
                kind = "no file matches" if glob.has_magic(item) else "no such file"
                raise FileNotFoundError(f"{item or repr(item)}: {kind}")
            paths += matches
    if not paths:
        raise ValueError("no input given")
    if paths.count(STDIN) > 1:
        raise ValueError("standard input (-) can be read only once")
    _tell_repeated(paths)
    return [_describe(path, text_unit) for path in paths]


def _tell_repeated(paths: Sequence[str]) -> None:
    """Two patterns, or a directory and a file in it, may name a file twice unawares."""
    named = Counter(path if "://" in path else os.path.abspath(path) for path in paths)
    repeated = [path for path, times in named.items() if times > 1]
    if repeated:
        more = f", and {len(repeated) - 1:,} more" if repeated[1:] else ""
        warnings.warn(
            f"named more than once, and read as often: {repeated[0]}{more}",
            RuntimeWarning,
            stacklevel=3,
        )


def _readable(inside: list[str]) -> list[str]:
    """What a directory of these files stands for."""
    records = [p for p in inside if p.lower().endswith(RECORDS)]
    return records or [p for p in inside if p.lower().endswith(TEXTS)]


def _matching(pattern: str) -> list[str]:
    """What a pattern matches; each folder under its ``**`` once, by its shortest name.

    ``glob`` follows links without an end: two that lead back are more names than it can list.
    """
    deep = _ANY_DEPTH.search(pattern)
    if deep is None:
        return glob.glob(pattern)
    above, within = pattern[: deep.start()], pattern[deep.end() :]
    if pattern.endswith("**"):
        within = within or "*"
    tops = [folder for folder in glob.glob(above) if os.path.isdir(folder)] if above else [""]
    return [
        path
        for folder in _folders_below(tops)
        for path in _matching(os.path.join(glob.escape(folder), within))
    ]


def _folders_below(tops: Sequence[str]) -> Iterator[str]:
    """These folders and all in them, but hidden ones, at any depth and behind links; each once."""
    waiting, seen = [(len(top), top) for top in tops], set()
    heapq.heapify(waiting)
    while waiting:
        _, folder = heapq.heappop(waiting)
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        yield folder
        with os.scandir(folder or ".") as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and _is_folder(e)]
        for path in (os.path.join(folder, name) for name in names):
            heapq.heappush(waiting, (len(path), path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_file_or_gone(path: str) -> bool:
    """A link to what is gone counts: to read it is an error, to leave it out would be silent."""
    return os.path.isfile(path) or not os.path.exists(path)


def _files_inside(directory: str) -> list[str]:
    """Files at any depth. Links to directories are followed after the real directories, and each
    directory is read once, even if a link leads back. The order is always the same."""

    def stop(error: OSError) -> None:  # or what cannot be read would be left out without a word
        raise error

    waiting, seen, found = [directory], set(), []
    for start in waiting:  # which grows
        for folder, folders, names in os.walk(start, onerror=stop):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            whole = (n for n in folders if not is_unfinished(os.path.join(folder, n)))
            folders[:] = sorted(whole)
            inside = [os.path.join(folder, name) for name in names]
            found += [p for p in inside if _is_file_or_gone(p)]
            links = [os.path.join(folder, name) for name in folders]
            waiting += [p for p in links if os.path.islink(p)]
    return found


def open_remote(url: str) -> io.BufferedReader:
    """A file of an object store, for reading from its start."""
    filesystem, path = _filesystem(url)
    return io.BufferedReader(cast(io.RawIOBase, filesystem.open(path, "rb")), 1 << 20)


def _describe(path: str, text_unit: str) -> Source:
    unit = text_unit if path.lower().endswith(TEXTS) else "json"
    if path == STDIN:
        if sys.stdin is None:
            raise ValueError("standard input (-) is closed; give files, or pipe text into it")
        return Source(path, 0, 0, False, "json")
    if "://" in path:
        with reached(path):
            filesystem, inner = _filesystem(path)
            found = filesystem.info(inner)
            with open_remote(path) as file:
                start = file.peek(START)[:START]
        if path.endswith(PARQUET) or start.startswith(b"PAR1"):
            raise ValueError(f"{path}: Parquet is read from several places; copy it here first")
        _refuse_other_formats(path, start)
        version = (
            found.get("ETag") or found.get("etag") or found.get("mtime") or found.get("created")
        )
        return Source(path, int(found["size"] or 0), str(version), False, unit)
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # a pipe, or process substitution's /dev/fd/63
        return Source(path, 0, 0, False, unit)
    with naming(path), open(path, "rb") as file:
        start = file.read(START)
    if start.startswith(b"PAR1"):
        return Source(path, status.st_size, status.st_mtime_ns, True, "parquet")
    _refuse_other_formats(path, start)
    plain = compression(start) is None
    return Source(path, status.st_size, status.st_mtime_ns, plain, unit)


def _refuse_other_formats(path: str, start: bytes) -> None:
    # Paths in commands as a shell takes them, for they are pasted there.
    if start.startswith(b"PK\x03\x04"):
        raise ValueError(
            f"{path}: a zip archive; unpack it: unzip -p {shlex.quote(path)} | mb-data ... "
            "--input -"
        )
    if start.startswith((b"ARROW1", b"\xff\xff\xff\xff")):  # a file of it, or a stream
        raise ValueError(
            f"{path}: Arrow, as save_to_disk of Hugging Face's datasets writes it; make Parquet of "
            'it: datasets.load_from_disk(FOLDER).to_parquet("data.parquet")'
        )
    if encoding := _wide_encoding(start):
        stem, end = os.path.splitext(path)
        here, there = shlex.quote(path), shlex.quote(f"{stem}.utf8{end}")
        raise ValueError(
            f"{path}: {encoding}; write it anew: iconv -f {encoding} -t UTF-8 {here} > {there}"
        )
    if start[257:262] == b"ustar" or path.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst")):
        raise ValueError(f"{path}: a tar archive; unpack it, or tar -xO it into standard input (-)")


def _wide_encoding(start: bytes) -> str | None:
    """The encoding of text in units of two or four bytes, by its byte order mark or its zeros."""
    marks = {b"\xff\xfe\0\0": 32, b"\0\0\xfe\xff": 32, b"\xff\xfe": 16, b"\xfe\xff": 16}
    for mark, bits in marks.items():
        if start.startswith(mark):
            return f"UTF-{bits}"
    zeros = [byte == 0 for byte in start[:4]]
    return {(False, True, False, True): "UTF-16LE", (True, False, True, False): "UTF-16BE"}.get(
        tuple(zeros)
    )


def _find_remote(url: str) -> list[str]:
    filesystem, path = _filesystem(url)
    # The web has no directories, and what looks like a pattern there is a query.
    web = url.startswith(("http://", "https://"))
    if web or not glob.has_magic(url):
        if not filesystem.exists(path):
            raise FileNotFoundError(f"{url}: no such file")
        if web or not filesystem.isdir(path):
            return [url]
        matches = _readable([str(p) for p in filesystem.glob(f"{path.rstrip('/')}/**")])
    else:
        found = filesystem.glob(path, detail=True)
        matches = [str(p) for p, about in found.items() if about["type"] == "file"]
    if not matches:
        raise FileNotFoundError(f"{url}: no file matches")
    # What stands around the path: a protocol, a host, another file system that this one caches.
    inner = path.rstrip("/")
    if inner and inner in url:
        before, _, behind = url.rstrip("/").rpartition(inner)
        return [before + match + behind for match in sorted(matches)]
    return [filesystem.unstrip_protocol(match) for match in sorted(matches)]


@contextlib.contextmanager
def reached(url: str) -> Generator[None]:
    """Turn what a store's library raises without a network or permission into an OSError."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ModuleNotFoundError as error:
        more = ", and the package of that store"
        raise missing_package("fsspec", url, "remote", more) from error
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:  # fsspec names the package of the store
        raise ModuleNotFoundError(f"{url}: {error}") from None
