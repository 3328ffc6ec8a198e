"""Files and folders that are replaced by whole ones, or not at all. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from mb_data.system import naming, sync_directory


def write_text(path: Path, text: str) -> None:
    """Replace a file by a whole new one."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(path: Path) -> Generator[Path]:
    """Yield a draft to write, which replaces `path` once it is whole and on the disk.

    After an error the draft is gone and `path` is as it was. Several writers of one file have a
    draft each, and the one that ends last stays.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with naming(path):
            yield draft
            _sync_file(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def replaceable(folder: Path) -> Path:
    """The resolved path of a folder that is to be replaced.

    Raises:
        ValueError: it is the current folder or one of its parents, which would be pulled away.
    """
    folder, here = folder.resolve(), Path.cwd()
    if folder in (here, *here.parents):
        raise ValueError(f"Expected a new folder to write, got {folder}, which you are in.")
    return folder


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Generator[Path]:
    """Yield an empty folder to fill, which replaces `folder`, and is on the disk, if nothing fails.

    It is filled beside `folder`, under a name that nobody else has.

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
        for path in draft.rglob("*"):
            if path.is_file():
                _sync_file(path)
            else:
                sync_directory(path)
        sync_directory(draft)
        if folder.exists():
            os.rename(folder, earlier)
        os.rename(draft, folder)
        sync_directory(folder.parent)
    finally:
        if earlier.exists() and not folder.exists():  # an error, or a Ctrl-C, between the two
            os.rename(earlier, folder)
        shutil.rmtree(beside, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
