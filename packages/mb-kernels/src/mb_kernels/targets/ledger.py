"""Builds that were found sound, so that the gate need not repeat them.

One kernel with the same arguments, for the same chip, by the same release of Triton becomes the
same binary. A ledger is a file with a hash of these for each such build. Where a kernel changes,
its hashes are in no ledger, and the gate compiles it again.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mb_kernels.targets.gate_case import GateCase
from mb_kernels.targets.table import Target

# How the gate compiles and what it asks of a binary. To be raised with every change of these.
_QUESTIONS = 1
_HASH = re.compile(r"[0-9a-f]{16}")
_HEAD = "# Sound builds, by `python -m mb_kernels.targets --ledger`: see mb_kernels.targets.ledger"


def fingerprint(case: GateCase, target: Target) -> str:
    """A hash of all that a build depends on, which a case's name is not.

    Of a kernel's source Triton hashes what it calls too, and the line where it begins.
    """
    import triton

    rest = replace(case, name="", kernel=None)
    parts = (_QUESTIONS, triton.__version__, target, case.kernel.cache_key, rest)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read(path: Path) -> set[str]:
    """The hashes in a ledger, none if there is no such file.

    Raises ValueError for a line that is none, as a merge leaves them, and where no ledger can be.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"Expected a ledger in a folder that exists, got {path}.")
    if not path.exists():
        return set()
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("#") and not _HASH.fullmatch(line):
            raise ValueError(
                f"{path}:{number}: expected 16 hexadecimal digits, got {line[:40]!r}; remove the "
                "line, and what it stood for is compiled again"
            )
    return {line for line in lines if not line.startswith("#")}


def write(path: Path, hashes: Iterable[str]) -> None:
    """Replace a ledger as a whole."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text("\n".join([_HEAD, *sorted(hashes)]) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
