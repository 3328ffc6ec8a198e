"""The folder of a run: what is where, and which checkpoint is the latest. Imports no torch.

RUN/config.toml                          the run as it was started
RUN/log.jsonl                            one JSON object per event
RUN/loss.png                             the picture of it
RUN/latest_checkpointed_iteration.txt    the iteration to go on from
RUN/iter_0000100/                        a checkpoint (see `checkpoint`)
RUN/data/                                the sample corpus, if the run made it
RUN/previous-1/                          what an earlier run of this folder left
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mb_train.config.resume import inherited

FORMAT = 1
LATEST = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
LOG_FILE = "log.jsonl"
PICTURE = "loss.png"


@dataclass(frozen=True)
class SavedRun:
    """The content of a checkpoint's run.json."""

    format: int
    iteration: int
    consumed_samples: int
    config: dict[str, Any]
    identity: dict[str, Any]
    data: dict[str, Any]
    torch: str

    def inherited(self) -> dict[str, Any]:
        """The fields that a run which goes on from here starts with."""
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


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint folder that `--load path` means: `path` itself or its latest; or None."""
    if (path / RUN_FILE).is_file():
        return path
    latest = path / LATEST
    if not latest.is_file():
        return None
    text = latest.read_text().strip()
    if not text.isdigit():
        raise ValueError(f"Expected {latest} to hold an iteration, got {text[:40]!r}.")
    folder = path / iteration_folder(int(text))
    if not (folder / RUN_FILE).is_file():
        raise ValueError(f"{latest} names iteration {text}, but {folder} holds no {RUN_FILE}.")
    return folder


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Read run.json of a checkpoint folder.

    Raises:
        ValueError: not a file of this program, or of a newer one.
    """
    path = checkpoint / RUN_FILE
    try:
        content = json.loads(path.read_text())
        run = SavedRun(**content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}.") from None
    if run.format != FORMAT:
        raise ValueError(f"Expected {path} in format {FORMAT}, got {run.format}.")
    return run


def set_aside(folder: Path) -> Path | None:
    """Move an earlier run's checkpoints and log into `previous-N`; data stays. None if nothing."""
    if not folder.is_dir():
        return None
    names = [CONFIG_FILE, LOG_FILE, PICTURE, LATEST]
    found = [folder / name for name in names if (folder / name).exists()]
    found += sorted(folder.glob("iter_[0-9]*"))
    if not found:
        return None
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    target = folder / f"previous-{number}"
    target.mkdir()
    for path in found:
        os.rename(path, target / path.name)
    return target


def write_text(path: Path, text: str) -> None:
    """Replace a file by a whole new one: temporary name, sync, rename."""
    draft = path.with_name(path.name + ".partial")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
