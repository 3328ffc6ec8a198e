"""What a run prints: lines, and on a terminal one more that says what is going on just now.

That one is written over again and again, and gone when a line is printed. In a file, or a pipe, it
is a line of its own, and only if nothing has been said for a while. A run never ends for what it
cannot say: of a full disk lines are lost, and a pipe whose reader has gone is a terminal that has
closed, SIGHUP, upon which a run saves and stops.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from typing import TextIO

from mb_train.untrusted import printable

# Nobody should wait longer than 10 s for a sign of life; steps of up to 2 s are allowed for.
_HEARTBEAT_S = 8.0
_REWRITE_S = 0.2
_CLEAR = "\r\x1b[2K"
_OF_THE_HOST = "DefaultCPUAllocator:"  # torch has no class for it, as it has for a GPU's


class Console:
    """Where a run speaks.

    Args:
        silent: of all ranks but one.
        stream: default standard output.
    """

    def __init__(self, *, silent: bool = False, stream: TextIO | None = None) -> None:
        self._silent, self._stream = silent, stream
        self._said = self._shown = time.monotonic()
        self._live = False

    def say(self, line: str) -> None:
        """Print a line."""
        self._said = time.monotonic()
        if self._silent:
            return
        self.clear()
        self._write(f"{printable(line)}\n")

    def show(self, doing: str) -> None:
        """Say what is going on: at once on a terminal, elsewhere if it has long been quiet."""
        now = time.monotonic()
        if self._silent:
            return
        if not self._rewrites:
            if now - self._said > _HEARTBEAT_S:
                self.say(f"  {doing}")
        elif now - self._shown > _REWRITE_S:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR + f"  {doing}"[:width])
            self._shown, self._live = now, True

    def clear(self) -> None:
        """Take the line that is written over away."""
        if self._live:
            self._write(_CLEAR)
            self._live = False

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            self._silent = True
            number = getattr(signal, "SIGHUP", signal.SIGTERM)
            if callable(signal.getsignal(number)):  # in another thread than the main one a run has
                signal.raise_signal(number)  # no handler, and the signal would kill the process
        except OSError:
            pass

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stdout

    @property
    def _rewrites(self) -> bool:
        return self._out.isatty() and os.environ.get("TERM") != "dumb"


def in_a_line(error: Exception) -> str:
    """What is said of an error that ends the program, or a part of its work."""
    if isinstance(error, OSError) and error.filename is not None:
        # Of a copy, where the disk is full at the second.
        names = [error.filename, *([] if error.filename2 is None else [error.filename2])]
        return printable(f"{' -> '.join(map(str, names))}: {error.strerror}")
    said = str(error)
    if out_of_memory(error):
        said = said[max(said.find(_OF_THE_HOST), 0) :]  # before it stands a line of torch's source
        said = " ".join(["not enough memory:", said, *getattr(error, "__notes__", ())])
    return printable(" ".join(said.split()))


def out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory, on a GPU or beside it."""
    torch = sys.modules.get("torch")  # without it there is no GPU
    on_gpu = torch is not None and isinstance(error, torch.OutOfMemoryError)
    of_host = isinstance(error, RuntimeError) and _OF_THE_HOST in str(error)
    return on_gpu or of_host or isinstance(error, MemoryError)
