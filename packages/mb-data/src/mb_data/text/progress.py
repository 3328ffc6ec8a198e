"""How far a run is, and one line about that, on a terminal or in a log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

LOG_INTERVAL = 10.0  # seconds between lines where there is no terminal


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of input on disk (``total`` 0 if unknown), and what came of them."""

    position: int
    total: int
    documents: int
    text_bytes: int
    seconds: float
    resumed_position: int
    resumed_documents: int
    resumed_text_bytes: int


class ProgressLine:
    """Shows ``Progress``: rewrites its line on a terminal, adds one now and then to a log."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        self.next_line = time.monotonic() + LOG_INTERVAL
        self.width = 0

    def __call__(self, progress: Progress) -> None:
        if not self.terminal:
            if time.monotonic() >= self.next_line:
                self.next_line += LOG_INTERVAL
                print(format_progress(progress), file=self.stream, flush=True)
            return
        text = format_progress(progress)
        self.stream.write("\r" + text.ljust(self.width))
        self.stream.flush()
        self.width = len(text)

    def close(self) -> None:
        """Leave the line."""
        if self.width:
            self.stream.write("\n")
            self.width = 0


def format_progress(progress: Progress) -> str:
    """As ``[====    ]  51% 1.20/2.35 GB, 71,234 documents/s, 301.2 MB/s, 0:00:04 left``.

    Megabytes are of UTF-8 text; rates and the time left are of this run, not of one it resumed.
    """
    seconds = max(progress.seconds, 1e-9)
    documents = (progress.documents - progress.resumed_documents) / seconds
    text = (progress.text_bytes - progress.resumed_text_bytes) / seconds / 1e6
    rates = f"{documents:,.0f} documents/s, {text:,.1f} MB/s"
    if not progress.total:
        return f"{progress.text_bytes / 1e9:.2f} GB of text, {rates}"
    share = progress.position / progress.total
    bar = "=" * round(20 * share)
    size = f"{progress.position / 1e9:.2f}/{progress.total / 1e9:.2f} GB"
    line = f"[{bar:20}] {share:4.0%} {size}, {rates}"
    done = progress.position - progress.resumed_position
    if done:
        left = round((progress.total - progress.position) * seconds / done)
        line += f", {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
    return line
