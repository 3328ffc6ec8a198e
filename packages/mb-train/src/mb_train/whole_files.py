"""Files and folders that are replaced by whole ones, or not at all. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a file by a whole new one."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(path: Path) -> Generator[Path]:
    """Where to write what takes the place of `path` once it is whole and on the disk, if it is.

    Who writes the same file meanwhile has a draft of his own; the last to end stays.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # that of a full disk comes without a name
        raise
    sync_directory(path.parent)


def replaceable(folder: Path) -> Path:
    """A folder that another may take the place of, resolved.

    Raises:
        ValueError: the current one, or one around it: whoever is in it would be nowhere.
    """
    folder, here = folder.resolve(), Path.cwd()
    if folder in (here, *here.parents):
        raise ValueError(f"Expected a new folder to write, got {folder}, which you are in.")
    return folder


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Generator[Path]:
    """An empty folder to fill; it takes the place of `folder` once it is whole, if it is.

    Until then it is in one of a new name beside it, so that nothing of anyone's is in the way.

    Raises:
        ValueError: as `replaceable`.
    """
    folder = replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    draft, earlier = beside / "new", beside / "earlier"
    try:
        draft.mkdir()
        yield draft
        if folder.exists():
            os.rename(folder, earlier)
        os.rename(draft, folder)
        sync_directory(folder.parent)
    finally:
        if earlier.exists() and not folder.exists():  # an error, or a Ctrl-C, between the two
            os.rename(earlier, folder)
        shutil.rmtree(beside, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable. Windows opens no folder: its file system sees to that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
