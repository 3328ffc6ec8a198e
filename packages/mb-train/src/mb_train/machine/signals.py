"""What means "save, then stop": SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1, the end of the time.

Schedulers send SIGUSR1 ahead of the end of a job, terminals SIGHUP when they close. A handler only
notes what came; the loop looks at the flag between steps. A second Ctrl-C ends at once.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Generator

_SAVING = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
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
    """Turn those signals into a flag for as long as the context lasts.

    A signal that the process was started to ignore (`nohup`) stays ignored. In a thread other than
    the main one no handler can be set: no signal raises the flag then.
    """
    flag = StopFlag()
    interrupted = False

    def note(number: int, _frame: object) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            raise KeyboardInterrupt
        interrupted = interrupted or number == signal.SIGINT
        flag.reason = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    replaced = {}
    try:
        for number in _SAVING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                replaced[number] = signal.signal(number, note)
        yield flag
    finally:
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
