"""Take every download address out of a uv lock file, keeping the versions.

One lock then serves the CUDA, ROCm and CPU builds of torch, whose wheels come from different
indexes: uv fills in the addresses of the index in use at the next `uv sync` or `uv run`, and keeps
the versions. Usage: python tools/strip_lock.py uv.lock
"""

import re
import sys
from pathlib import Path


def strip(lock: str) -> str:
    """Return `lock` without registry addresses, distributions and members' requirement lists."""
    lock = re.sub(r'\{ registry = "[^"]*" \}', '{ registry = "." }', lock)
    lock = re.sub(r"^sdist = .*\n", "", lock, flags=re.MULTILINE)
    lock = re.sub(r"^wheels = \[\n(?: .*\n)*\]\n", "", lock, flags=re.MULTILINE)
    # An empty requirement list no longer matches the members, which is what makes uv resolve again.
    lock = re.sub(r"^requires-dist = \[\n(?: .*\n)*\]", "requires-dist = []", lock, flags=re.M)
    return re.sub(r"^requires-dist = \[.*\]$", "requires-dist = []", lock, flags=re.MULTILINE)


def main() -> None:
    path = Path(sys.argv[1])
    stripped = strip(path.read_text())
    if "://" in stripped:
        sys.exit(f"{path} still holds an address after stripping: update tools/strip_lock.py")
    path.write_text(stripped)


if __name__ == "__main__":
    main()
