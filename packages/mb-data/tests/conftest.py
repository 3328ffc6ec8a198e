"""What several test files look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def reads_pages_one_by_one() -> Callable[[Any], bool]:
    """Whether the system was told that neighbours of a dataset's samples are not wanted."""

    def look(dataset: Any) -> bool:
        try:
            maps = Path("/proc/self/smaps").read_text()
        except FileNotFoundError:  # Linux alone tells
            return True
        name, found = f"{Path(dataset.indexed.prefix).resolve()}.bin", []
        for line in maps.splitlines():
            if line.startswith("VmFlags:") and found and found[-1] is None:
                found[-1] = " rr" in line
            elif line.endswith(name):
                found.append(None)
        return bool(found) and all(found)

    return look
