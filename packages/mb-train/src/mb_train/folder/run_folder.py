"""The folder of a run: what is where, and which checkpoint is the latest. Imports no torch.

RUN/config.toml                          the run as it was started
RUN/log.jsonl                            one JSON object per event
RUN/loss.png, RUN/report.html            pictures of it
RUN/latest_checkpointed_iteration.txt    the iteration to go on from
RUN/iter_0000100/                        a checkpoint (see `checkpoint`)
RUN/tokenizer/                           copies of the tokenizer's files, if it is made from any
RUN/data/                                the sample corpus, if the run made it
RUN/previous-1/                          what an earlier run, or a branch left behind, was

The checkpoints of a folder are one line of history: a run that begins anew, or goes back to an
earlier iteration, first moves what it does not build on into `previous-N`. Such a move is many
renames, so `.moving.json` notes it before it begins: if the run is killed in the middle, the next
one finishes the move (`recover`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mb_train.config.resume import inherited
from mb_train.folder.checksums import SUMS_FILE, read_sums, sum_of
from mb_train.folder.whole_files import sync_directory, write_text

# 2 has checksums. 1 had none, and is still read.
FORMAT = 2
LATEST = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
LOG_FILE = "log.jsonl"
PICTURE = "loss.png"
PAGE = "report.html"
TOKENIZER = "tokenizer"
_MOVING = ".moving.json"


@dataclass(frozen=True)
class SavedRun:
    """The content of a checkpoint's run.json.

    Attributes:
        written: seconds since 1970 at which it was saved; 0 where the file does not say.
        state: small values that a run goes on with beside its tensors (the loss scale, say).
    """

    format: int
    iteration: int
    consumed_samples: int
    config: dict[str, Any]
    identity: dict[str, Any]
    data: dict[str, Any]
    torch: str
    written: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)

    def inherited(self) -> dict[str, Any]:
        """The fields that a run which goes on from here starts with.

        Raises:
            ValueError: a field that this mb-train does not know.
        """
        return inherited(self.config, RUN_FILE)

    def check_model(self, identity: Mapping[str, Any]) -> None:
        """Raise ValueError if a model of this identity is not the one that was saved."""
        for name, here in identity.items():
            there = self.identity.get(name, here)  # an older run does not know newer options
            if there != here:
                raise ValueError(
                    f"The checkpoint is of another model: its {name} is {there}, this run's is "
                    f"{here}."
                )


def iteration_folder(iteration: int) -> str:
    """Name of a checkpoint's folder."""
    return f"iter_{iteration:07d}"


def iteration_of(checkpoint: Path) -> int:
    """The iteration that a checkpoint's folder is named after."""
    return int(checkpoint.name.removeprefix("iter_"))


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run folder, by iteration."""
    found = [p for p in folder.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", p.name)]
    return sorted(found, key=iteration_of)


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint folder that `--load path` means: `path` itself or the latest in it; or None.

    If no file names the latest, as after a kill during a run's first save, the last one is taken.

    Raises:
        ValueError: the file that names the latest is damaged, or names one that is not there.
    """
    if (path / RUN_FILE).is_file():
        return path if path.name not in ("", "..") else path.resolve()  # it is known by its name
    latest = path / LATEST
    if not latest.is_file():
        # In the middle of a move, what is left is none of this folder's.
        whole = [] if (path / _MOVING).is_file() else _whole(path)
        return whole[-1] if whole else None
    text = latest.read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"Expected {latest} to hold an iteration, got {text[:40]!r}.{_others(path)}"
        )
    folder = path / iteration_folder(int(text))
    if not (folder / RUN_FILE).is_file():
        raise ValueError(
            f"{latest} names iteration {text}, but {folder} holds no {RUN_FILE}.{_others(path)}"
        )
    return folder


def checkpoint_in(path: Path) -> Path:
    """`find_checkpoint`, where there must be one.

    Raises:
        ValueError: there is none; says so if it is another program's.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"Expected a checkpoint in {path}, found none.{_whose(path)}")
    return checkpoint


def _whose(path: Path) -> str:
    there = {"Hugging Face": ["config.json"], "Megatron": ["mp_rank_*", "iter_*/mp_rank_*"]}
    for name, patterns in there.items():
        if any(next(path.glob(pattern), None) for pattern in patterns):
            return f" It is one of {name}'s: the convert command makes a run folder of it."
    return ""


def _whole(folder: Path) -> list[Path]:
    return [path for path in checkpoints(folder) if (path / RUN_FILE).is_file()]


def _others(folder: Path, damaged: Path | None = None) -> str:
    there = [path for path in _whole(folder) if path != damaged]
    return f" There is {there[-1]}: give that to --load." if there else _whose(folder)


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Read run.json of a checkpoint folder.

    Raises:
        ValueError: not a file of this program, or of a newer one.
    """
    path = checkpoint / RUN_FILE
    try:
        content = json.loads(path.read_text())
        found = content["format"]
    except OSError as error:
        raise ValueError(
            f"Cannot read {path}: {error.strerror}." + _others(checkpoint.parent, checkpoint)
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {error}."
            + _others(checkpoint.parent, checkpoint)
        ) from None
    if found not in range(1, FORMAT + 1):
        raise ValueError(
            f"Expected {path} in format 1 to {FORMAT}, got {found}. A later mb-train wrote it: "
            "update this one."
        )
    known = {f.name: f for f in fields(SavedRun)}
    for name in content.keys() - known.keys():
        raise ValueError(f"{path} has a key that this mb-train does not know: {name!r}.")
    kinds = {"int": int, "float": (int, float), "str": str}
    for name, f in known.items():
        kind = kinds.get(str(f.type), dict)
        if name in content and not isinstance(content[name], kind):
            raise ValueError(f"{path} is damaged: its {name} is {content[name]!r}.")
    try:
        saved = SavedRun(**content)
    except TypeError as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if not _is_as_written(path):  # said before anything is made of the sizes in it
        raise ValueError(
            f"{path} is damaged: it is not what was written."
            + _others(checkpoint.parent, checkpoint)
        )
    width = saved.identity.get("ffn_size")
    if width is not None and saved.config.get("ffn_hidden_size") is None:
        saved.config["ffn_hidden_size"] = width  # the default has been another
    return saved


def _is_as_written(path: Path) -> bool:
    """Whether a file is what its folder's checksums say; True where they do not say."""
    try:
        sums = read_sums(path.with_name(SUMS_FILE))
    except (OSError, ValueError):  # `load_checkpoint` tells of these
        return True
    return sums.get(path.name) in (None, sum_of(path))


def recover(folder: Path) -> list[str]:
    """Clean up after a run that was killed; call it with the folder's lock held.

    Finishes a move, puts back a checkpoint that was being replaced, removes half-written ones and
    the rest of half-deleted ones.

    Returns:
        What was done, a line each.

    Raises:
        ValueError: what was written of a move is damaged.
    """
    done = []
    journal = folder / _MOVING
    if journal.is_file():
        try:
            target = _finish_move(folder, json.loads(journal.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{journal}, which says what of an earlier run was on its way into a previous-N, "
                f"is damaged: {error!r}. Move that by hand, and remove the file."
            ) from None
        done.append(f"finished moving an earlier run to {target}")
    for old in sorted(folder.glob("iter_*.old")):
        final = old.with_suffix("")
        if final.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, final)
            done.append(f"put {final} back, which was about to be replaced")
    for draft in sorted(folder.glob("iter_*.partial")):
        shutil.rmtree(draft)
        done.append(f"removed {draft}, a checkpoint that was never finished")
    for surplus in folder.glob("iter_*.surplus"):
        shutil.rmtree(surplus)
    for name in (_MOVING, CONFIG_FILE, PICTURE, PAGE, LATEST):
        for draft in folder.glob(f"{name}*.partial"):
            draft.unlink(missing_ok=True)
    return done


def withdraw(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be deleted; returns its new path.

    If the deletion is killed halfway, the rest must not look like a checkpoint.

    Raises:
        OSError: it cannot be renamed.
    """
    return checkpoint.rename(checkpoint.with_name(checkpoint.name + ".surplus"))


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's checkpoints and log into `previous-N`; data stays. None if nothing."""
    names = [CONFIG_FILE, LOG_FILE, PICTURE, PAGE, TOKENIZER, LATEST]
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
    write_text(folder / _MOVING, json.dumps(move) + "\n")
    return _finish_move(folder, move)


def _finish_move(folder: Path, move: Mapping[str, Any]) -> Path:
    target = folder / move["target"]
    target.mkdir(exist_ok=True)
    for name in move["names"]:
        if (folder / name).exists() and not (target / name).exists():
            os.rename(folder / name, target / name)
    if move["branch"] is not None:
        for name in (CONFIG_FILE, LOG_FILE):
            if (folder / name).exists():
                shutil.copyfile(folder / name, target / name)
        if (folder / TOKENIZER).is_dir():
            shutil.copytree(folder / TOKENIZER, target / TOKENIZER, dirs_exist_ok=True)
        write_text(target / LATEST, f"{move['branch']}\n")
    sync_directory(target)
    (folder / _MOVING).unlink()
    sync_directory(folder)
    return target
