"""What this process may use of the host."""

import os


def cores() -> int:
    """Those that this process may use: a container or a batch job often has a few of many."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
