"""How much memory there is, by the kernel and by the control groups of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Where limits of memory are told: of `docker run --memory` and Kubernetes in the first folder
# itself, of Slurm and systemd in the one that the second file names, or in one around it.
GROUPS, OURS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
