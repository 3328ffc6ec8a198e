"""One run per folder: a lock on it, held for as long as the run lives.

The kernel lets go of the lock when the process ends, however it ends, so a killed run leaves
nothing to clean up. Beside the lock lies a note of who holds it, for the message to the second.
Some network file systems have no locks; there a run goes on without one, with a warning.
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from mb_data.system import try_lock

from mb_train.untrusted import json_of

LOCK_FILE = ".lock"
HOLDER_FILE = ".lock-holder.json"


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of a run folder, which is made if need be.

    Raises:
        ValueError: another process holds it; says which.
        OSError: the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    note = folder / HOLDER_FILE
    with ExitStack() as ended:  # each end before its beginning: a signal may come in between
        ended.callback(_leave_nothing, folder, made)
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_of(folder, timeout=0)
        ended.push(lock)
        try:
            lock.__enter__()
        except Timeout:
            raise ValueError(
                f"Expected {folder} to be free, but {_holder(folder)} is writing it. "
                "Wait for it to end, or give another folder."
            ) from None
        ended.callback(_unlink, note)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        note.write_text(json.dumps(about) + "\n")
        yield


def _unlink(path: Path) -> None:
    with suppress(OSError):  # the folder is gone, or cannot be reached
        path.unlink(missing_ok=True)


def _leave_nothing(folder: Path, made: list[Path]) -> None:
    """Remove the folders that were made, if nothing came of the run: as if it had not been."""
    with suppress(OSError, Timeout):
        if folder in made and [path.name for path in folder.iterdir()] == [LOCK_FILE]:
            lock, _ = _lock(folder, timeout=0)
            with lock:  # another may have it by now
                _unlink(folder / LOCK_FILE)  # on Windows it is open, and stays
    for path in made:
        with suppress(OSError):
            path.rmdir()


def lock_of(folder: Path, timeout: float = -1) -> AbstractContextManager[object]:
    """The lock of a folder that is there, to be waited for so many seconds, or for ever.

    Where the file system has none it is no lock, and a warning.
    """
    lock, lacks = _lock(folder, timeout)
    if lacks is not None:
        warnings.warn(
            f"{folder}: this file system has no locks ({lacks.strerror}); see that no other run "
            "writes there",
            RuntimeWarning,
            stacklevel=2,
        )
    return lock


def _lock(folder: Path, timeout: float) -> tuple[AbstractContextManager[object], OSError | None]:
    """The lock; or no lock, and why the file system has none.

    FileLock alone would refuse the folder there or, by the error that it gets, hold it by a file
    that outlives a kill.
    """
    path = folder / LOCK_FILE
    with open(path, "ab") as file:
        try:
            try_lock(file.fileno())  # given back with the file
        except OSError as error:
            return nullcontext(), error
    return FileLock(path, timeout=timeout), None


def _holder(folder: Path) -> str:
    try:
        about = json_of((folder / HOLDER_FILE).read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']},"
    except (OSError, ValueError, TypeError, KeyError):
        return "another run"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
