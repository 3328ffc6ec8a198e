"""What becomes of earlier checkpoints of a run folder: moved aside, recovered, withdrawn.

The checkpoints of a folder are one line of history: a run that begins anew, or goes back to an
earlier iteration, first moves what it does not build on into `previous-N`. Such a move is many
renames, so `.moving.json` notes it before it begins: if the run is killed in the middle, the next
one finishes the move (`recover`). The file that names the latest checkpoint goes first: while it is
there a run has not begun to move, and stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mb_data.system import sync_directory

from mb_train.folder.run_folder import (
    CONFIG_FILE,
    LATEST,
    LOG_FILE,
    MOVING,
    PAGE,
    PARTIAL,
    PICTURE,
    SURPLUS,
    TOKENIZER,
    checkpoints,
    iteration_of,
)
from mb_train.folder.whole_files import write_text
from mb_train.untrusted import json_of


def recover(folder: Path) -> list[str]:
    """Clean up after a run that was killed; call it with the folder's lock held.

    Finishes a move that has begun, removes half-written checkpoints and the rest of half-deleted
    ones.

    Returns:
        What was done, a line each.

    Raises:
        ValueError: what was written of a move is damaged.
    """
    done = []
    journal = folder / MOVING
    if journal.is_file():
        try:
            move = json_of(journal.read_text())
            if LATEST in move["names"] and (folder / LATEST).exists():
                _give_up_move(folder, move)
            else:
                done.append(f"finished moving an earlier run to {_finish_move(folder, move)}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{journal}, which says what of an earlier run was on its way into a previous-N, "
                f"is damaged: {error!r}. Move that by hand, and remove the file."
            ) from None
    for draft in sorted(folder.glob(f"iter_*{PARTIAL}")):
        shutil.rmtree(draft)
        done.append(f"removed {draft}, a checkpoint that was never finished")
    for surplus in folder.glob(f"iter_*{SURPLUS}"):
        delete(surplus)
    for name in (MOVING, CONFIG_FILE, PICTURE, PAGE, LATEST, f"{TOKENIZER}/**/"):
        for draft in folder.glob(f"{name}*{PARTIAL}"):
            draft.unlink(missing_ok=True)
    return done


def withdraw(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be deleted; returns its new path.

    If the deletion is killed halfway, the rest must not look like a checkpoint.

    Raises:
        OSError: it cannot be renamed.
    """
    return checkpoint.rename(checkpoint.with_name(checkpoint.name + SURPLUS))


def delete(withdrawn: Path) -> None:
    """Delete what `withdraw` renamed. Of a checkpoint that somebody moved to another disk, and left
    a link to, the link alone.

    Raises:
        OSError: it cannot be deleted.
    """
    if withdrawn.is_symlink():
        withdrawn.unlink()
    else:
        shutil.rmtree(withdrawn)


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's checkpoints and log into `previous-N`; data stays. None if nothing."""
    names = [LATEST, CONFIG_FILE, LOG_FILE, PICTURE, PAGE, TOKENIZER]
    found = [name for name in names if (folder / name).exists()]
    found += [path.name for path in checkpoints(folder)]
    return _move(folder, found) if found else None


def set_later_aside(folder: Path, iteration: int) -> Path | None:
    """Move the checkpoints after `iteration` into `previous-N`, with a copy of their log.

    For a run that goes back to `iteration`, which from here on is the latest. `previous-N` is a run
    folder itself: the branch can be gone on with from there. None if there are none.
    """
    later = [path for path in checkpoints(folder) if iteration_of(path) > iteration]
    if not later:
        return None
    write_text(folder / LATEST, f"{iteration}\n")
    return _move(folder, [path.name for path in later], branch=iteration_of(later[-1]))


def _move(folder: Path, names: list[str], *, branch: int | None = None) -> Path:
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    move = {"target": f"previous-{number}", "names": names, "branch": branch}
    write_text(folder / MOVING, json.dumps(move) + "\n")
    return _finish_move(folder, move)


def _give_up_move(folder: Path, move: Mapping[str, Any]) -> None:
    """Of a move before its first rename."""
    with contextlib.suppress(OSError):  # it was not made yet, or is not empty
        _target(folder, move).rmdir()
    (folder / MOVING).unlink()
    sync_directory(folder)


def _target(folder: Path, move: Mapping[str, Any]) -> Path:
    """Where a move goes. The folder may be a stranger's: nothing moves but within it."""
    for name in (move["target"], *move["names"]):
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is no name of something in this folder")
    return folder / move["target"]


def _finish_move(folder: Path, move: Mapping[str, Any]) -> Path:
    target = _target(folder, move)
    target.mkdir(exist_ok=True)
    for name in move["names"]:
        here, there = folder / name, target / name
        if here.is_symlink():  # a relative one would lead elsewhere from there
            if not there.is_symlink():
                there.symlink_to(here.resolve())
            here.unlink()
        elif here.exists() and not there.exists():
            os.rename(here, there)
    if move["branch"] is not None:
        for name in (CONFIG_FILE, LOG_FILE):
            if (folder / name).exists():
                shutil.copyfile(folder / name, target / name)
        if (folder / TOKENIZER).is_dir():
            shutil.copytree(folder / TOKENIZER, target / TOKENIZER, dirs_exist_ok=True)
        write_text(target / LATEST, f"{move['branch']}\n")
    sync_directory(target)
    (folder / MOVING).unlink()
    sync_directory(folder)
    return target
