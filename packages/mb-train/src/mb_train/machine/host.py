"""This process on its host: whether it speaks, how it waits and keeps memory, what there is of it.

No torch: some of it has to be set before that is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

# malloc.h of glibc. Memory up to the first size comes from the heap, and the heap gives none of it
# back; beyond it every allocation asks the kernel.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 1 << 30

# Where limits of memory are told: of `docker run --memory` and Kubernetes in the first folder
# itself, of Slurm and systemd in the one that the second file names, or in one around it.
GROUPS, OURS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def leads() -> bool:
    """Whether this process is the one that speaks: alone, or rank 0 of those that torchrun made."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # whatever RANK is left over
    return alone or os.environ.get("RANK", "0") == "0"


def prepare_host() -> None:
    """Let threads sleep while they wait, keep freed memory for the next tensor, open many files."""
    # Read by OpenMP when torch is imported. Threads that spin while they wait made steps 2 to 4
    # times slower on two cores that ran anything else as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    open_many_files()


def keep_freed_memory() -> None:
    """Do not hand freed blocks of up to 1 GiB back to the kernel.

    By default glibc asks the kernel anew, page by page, for every large tensor: 30 steps of
    `quickstart` took 9.3 s of system time, and take 1.1 s with this, for a fifth more memory.
    Other C libraries are left as they are.
    """
    if sys.platform == "win32":  # a program there has no one C library to ask for
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def open_many_files() -> None:
    """Let this process open as many files as it may ask for.

    A dataset of a blend keeps up to five open, its own two and an index for each part. Two hundred
    would end a run at the 1024 that systems begin with for the sake of programs that use select().
    """
    try:
        import resource
    except ImportError:  # Windows has neither the module nor the limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names one that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def first_import() -> Generator[None]:
    """Within it torch is imported, without collections of garbage: what modules make stays.

    Later collections pass over it, too: torch alone is half a million objects, and a full
    collection looks at all of them. Nothing of this where torch is imported already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def leave_out_of_collections() -> None:
    """Let collections of garbage pass over all that there is, until `gc.unfreeze`.

    A full one, every few hundred steps, looks at what torch and the model are made of, for a tenth
    to a quarter of a second, and with several ranks all wait for the one that is at it: of 800
    steps of a small dMoE on a CPU collections took 33 ms instead of 448, by hand.
    """
    gc.collect()
    gc.freeze()


class ControlGroup(NamedTuple):
    """A limit of memory.

    Attributes:
        limit: bytes that the processes of the group may hold together.
        used: that they hold, without pages of files that were read, which give way; 0 if the group
            does not tell.
    """

    limit: int
    used: int


# Files of a group and lines of its memory.stat, by the version of control groups that its line in
# OURS is of: "0::/PATH" of the second, "4:memory:/PATH" of the first.
_VERSIONS = {
    "": (".", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}  # fmt: skip
_NO_LIMIT = 1 << 60  # the first version has a number for it, a page short of 2 to the 63rd


def control_groups() -> list[ControlGroup]:
    """Those with a limit that this process is in: its own, and those around it."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in OURS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in _VERSIONS:
                    found += _limited(path, *_VERSIONS[controller])
    return found


def _limited(
    path: str, root: str, limit: str, used: str, files: tuple[str, ...]
) -> Iterator[ControlGroup]:
    own = GROUPS / root / path.lstrip("/")
    for group in (own, *own.parents):
        # In a container the path may be that of outside: what is not there has no limit either.
        with contextlib.suppress(OSError, ValueError):
            bound = int((group / limit).read_text())  # or "max"
            if bound < _NO_LIMIT:
                yield ControlGroup(bound, _used(group, used, files))
        if group == GROUPS / root:
            return


def _used(group: Path, used: str, files: tuple[str, ...]) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        held = dict(map(str.split, lines))
        return int((group / used).read_text()) - sum(int(held[name]) for name in files)
    except (OSError, ValueError, KeyError):
        return 0


def host_memory() -> int:
    """Bytes that a process can still take on this host, by the kernel and by its control groups.

    Pages of files that were read count as free in both: they give way, and token files fill all
    that a container has.
    """
    there = 1 << 62
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                there = 1024 * int(line.split()[1])
    return min([there, *(max(group.limit - group.used, 0) for group in control_groups())])


def memory_limit() -> int | None:
    """Bytes that the control groups of this process may hold; None where they have no limit."""
    return min((group.limit for group in control_groups()), default=None)
