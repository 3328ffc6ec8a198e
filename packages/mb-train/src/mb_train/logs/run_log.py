"""The log of a run, RUN/log.jsonl: one JSON object for each event, written and read back."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

from mb_train.folder.run_folder import LOG_FILE
from mb_train.logs.boards import Boards
from mb_train.untrusted import json_of
from mb_train.words import counted


class RunLog:
    """Appends events to RUN/log.jsonl, and tells boards of them; either may be absent.

    What a full disk does not take is kept in memory and written with a later event, so that a
    checkpoint that fills the disk, fails and is removed leaves no gap in the log.

    Args:
        path: of the log; None writes none.
        boards: are closed with it.
    """

    def __init__(self, path: Path | None, boards: Boards | None = None) -> None:
        self._path, self._boards = path, boards
        self._file: io.FileIO | None = None
        self._held, self._why = b"", ""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":  # a kill cut the last line short
                    self._append(b"\n")

    def write(self, event: str, **values: Any) -> None:
        """Append one object; not-a-number becomes null, so that every JSON reader takes it."""
        self._append((json.dumps(_finite({"event": event, **values})) + "\n").encode())
        if self._boards is not None:
            self._boards.write(event, values)

    def close(self) -> None:
        """Close the files; warn of events that there was no room for until now."""
        self._append(b"")
        if self._file is not None:
            self._file.close()
        if self._boards is not None:
            self._boards.close()
        if self._held:
            lost = counted(self._held.count(b"\n"), "event")
            warnings.warn(
                f"{self._path} lacks the last {lost} of this run, which could not be written: "
                f"{self._why}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _append(self, content: bytes) -> None:
        if self._file is None:
            return
        self._held += content
        while self._held:
            try:
                self._held = self._held[self._file.write(self._held) :]
            except OSError as error:
                self._why = error.strerror or str(error)
                return


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def log_of(folder: Path) -> Path:
    """RUN/log.jsonl.

    Raises:
        ValueError: there is none.
    """
    path = folder / LOG_FILE
    if not path.is_file():
        raise ValueError(f"Expected {folder} to be a run folder with a {LOG_FILE}, found none.")
    return path


def number(value: float | None) -> float:
    """A number of a log, which has null for what is none."""
    return math.nan if value is None else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """Events of a log. A line that a kill cut short is the event "torn", with its `line` number.

    An editor may have left blank lines, or a byte order mark.
    """
    events = []
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            event = json_of(line)
            whole = isinstance(event, dict) and isinstance(event.get("event"), str)
        except ValueError:
            whole = False
        events.append(event if whole else {"event": "torn", "line": number})
    return events


def replay(path: Path) -> list[tuple[dict[str, Any], float]]:
    """Events of a log, each with the last iteration of which it counts.

    A run that went on from an iteration replaces what an earlier one did after it.
    """
    events, until = [], math.inf
    for event in reversed(read_log(path)):
        events.append((event, until))
        if event["event"] == "start":
            at = event.get("iteration", 0)
            until = min(until, at) if isinstance(at, int) else until
    return events[::-1]
