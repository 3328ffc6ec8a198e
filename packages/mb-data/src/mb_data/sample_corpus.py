"""Real text that is on every machine: the sources of the running Python's standard library.

``write_sample_corpus`` makes a JSON Lines file of them, one module per line with its text and its
path, always in the same order for one Python version.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sysconfig
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

DEFAULT_MAX_BYTES = 8 << 20


def write_sample_corpus(
    path: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Path:
    """Write the corpus, at most ``max_bytes`` long; returns its path.

    Each line is ``{"text": source, "path": "json/decoder.py"}``. Modules come in an order that
    mixes the packages, by a hash of the path, so that any prefix of the file looks like the rest.

    Raises ValueError if not one module fits, or this Python came without its sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    written = 0
    with written_whole(path) as file:
        for source in _modules(library):
            try:
                text = source.read_text("utf-8")
            except UnicodeDecodeError:  # test data in other encodings
                continue
            if not text.strip():
                continue
            record = {"text": text, "path": source.relative_to(library).as_posix()}
            line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
            if written + len(line) > max_bytes:
                continue
            file.write(line)
            written += len(line)
        if not written:
            raise ValueError(f"no Python source of at most {max_bytes} bytes in {library}")
    return Path(path)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A file to write that gets its name at the end, synced; after an error there is none."""
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _modules(library: Path) -> list[Path]:
    """Modules of the library proper: neither what was installed into it nor its test suite."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    skip |= {"encodings", "pydoc_data"}  # tables, not prose or programs
    found = [
        source
        for source in library.rglob("*.py")
        if skip.isdisjoint(source.relative_to(library).parts[:-1])
    ]

    def key(source: Path) -> tuple[int, str]:
        name = source.relative_to(library).as_posix()
        return zlib.crc32(name.encode()), name

    return sorted(found, key=key)
