"""Checksums of a checkpoint's files, as `sha256sum` writes and checks them.

    cd RUN/iter_0000100 && sha256sum --check SHA256SUMS

SHA-256 because every processor of the last years has instructions for it (1 to 2 GB/s a core) and
every machine has the command. Each rank sums what it writes; the files are checked by all ranks
together, each its share, a file on each core at a time (one core takes 10 s for 10 GB).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

SUMS_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/]+)")


def sum_of(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with _naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _naming(path: Path) -> AbstractContextManager[None]:
    from mb_data.system import naming  # here: NumPy comes with it, and help does not wait for that

    return naming(path)


def format_sums(sums: Mapping[str, str]) -> str:
    """Lines of a SHA256SUMS file, by file name."""
    return "".join(f"{value}  {name}\n" for name, value in sorted(sums.items()))


def read_sums(path: Path) -> dict[str, str]:
    """Sums by file name.

    Raises:
        ValueError: not such a file.
    """
    sums = {}
    with _naming(path):
        content = path.read_bytes()
    for line in content.decode("utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path} is damaged: {line[:80]!r} is no line of a SHA256SUMS file.")
        sums[match[2]] = match[1]
    return sums


def damage(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """What is wrong with the files `names` of a folder, in words; empty if nothing is."""
    from concurrent.futures import ThreadPoolExecutor  # here: 20 ms, which help does not wait for

    from mb_data.system import cores

    with ThreadPoolExecutor(cores()) as pool:
        found = pool.map(partial(_damage_of, folder, sums), names)
        return [wrong for wrong in found if wrong is not None]


def _damage_of(folder: Path, sums: Mapping[str, str], name: str) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{path} is missing"
    if name not in sums:
        return f"{folder / SUMS_FILE} does not list {name}"
    return None if sum_of(path) == sums[name] else f"{path} is damaged: it is not what was written"
