"""What means "save, then stop": SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1, the end of the time.

And what means to stop at once, without leaving a half of anything (`interrupting`).

Schedulers send SIGUSR1 ahead of the end of a job, terminals SIGHUP when they close. A handler only
notes what came; the loop looks at the flag between steps. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator
from types import FrameType

_SAVING, _ENDING = (
    [getattr(signal, name) for name in names if hasattr(signal, name)]
    for names in (("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"), ("SIGTERM", "SIGHUP"))
)


class StopFlag:
    """Whether a signal has asked to stop, the time is over, or the run cannot go on otherwise.

    Attributes:
        reason: "SIGTERM", say, or what failed; None as long as nothing came.
        failed: nobody asked: something went wrong.
        deadline: when the allowed time ends, by `time.monotonic`.
    """

    reason: str | None = None
    failed: bool = False
    deadline: float = math.inf

    def fail(self, what: str) -> None:
        """Stop because something went wrong."""
        self.reason, self.failed = what, True

    @property
    def late(self) -> bool:
        """Whether the allowed time is over."""
        return time.monotonic() > self.deadline

    def __bool__(self) -> bool:
        return self.reason is not None or self.late


@contextlib.contextmanager
def stop_signals() -> Generator[StopFlag]:
    """Turn those signals into a flag for as long as the context lasts, see `_handled`."""
    flag = StopFlag()
    interrupted = False

    def note(number: int, _frame: object) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt
        interrupted = interrupted or number == signal.SIGINT
        flag.reason = signal.Signals(number).name

    with _handled(_SAVING, note):
        yield flag


@contextlib.contextmanager
def interrupting() -> Generator[None]:
    """Have SIGTERM and SIGHUP end what runs inside as a Ctrl-C does, by an exception.

    They would end the process where it is, and leave the draft of what it writes.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with _handled(_ENDING, interrupt):
        yield


@contextlib.contextmanager
def _handled(
    numbers: Collection[int], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Give these signals a handler for as long as the context lasts.

    One that the process was started to ignore (`nohup`) stays ignored. In a thread other than the
    main one no handler can be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                replaced[number] = signal.signal(number, handler)
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
