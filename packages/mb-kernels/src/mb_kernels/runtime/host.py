"""What this process may use of the host."""

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # what `docker run --cpus` and Kubernetes' limits set


def cores() -> int:
    """As many as it may use: a container or a batch job has a few of many, or a quota."""
    there = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    try:  # "250000 100000" us, of all cores in each such period, are two; "max 100000" is no quota
        share, each = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return there
    return max(min(there, share // each), 1)
