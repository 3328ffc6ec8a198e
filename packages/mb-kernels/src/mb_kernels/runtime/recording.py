"""A rehearsal: what would be launched is listed, and nothing runs, so that meta tensors will do."""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """What ``launch`` was given."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


# A thread has a value of its own.
_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def record() -> Generator[list[Launch]]:
    """Within: this thread's launches are listed; ops on meta tensors launch what a GPU would."""
    listed: list[Launch] = []
    outer = _recorded.set(listed)
    try:
        yield listed
    finally:
        _recorded.reset(outer)


def recorded() -> list[Launch] | None:
    """This thread's list; None outside of ``record``."""
    return _recorded.get()
