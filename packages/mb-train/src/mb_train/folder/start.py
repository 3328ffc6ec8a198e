"""The checkpoint that a run goes on from, if it does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mb_train.config import TrainConfig, whole
from mb_train.config.resume import check_changes
from mb_train.folder.run_folder import (
    SavedRun,
    checkpoint_in,
    checkpoint_of,
    find_checkpoint,
    is_iteration,
    read_saved_run,
    whose,
)


@dataclass(frozen=True)
class Start:
    """The checkpoint folder that a run goes on from, and its run.json."""

    checkpoint: Path
    saved: SavedRun

    @property
    def run(self) -> Path:
        """Folder of the run that it is a checkpoint of."""
        return self.checkpoint.parent

    @property
    def told(self) -> dict[str, Any]:
        """What tells this checkpoint from others, also from one that had its place before."""
        return {"checkpoint": str(self.checkpoint), "written": self.saved.written}

    def is_in(self, folder: Path) -> bool:
        """Whether the checkpoint is one of this run folder's, where links in either lead to.

        One that was moved to another disk, and has a link in its place, still is.
        """
        places = self.run.resolve(), self.checkpoint.resolve().parent
        return folder.resolve() in places

    def is_end_of(self, config: TrainConfig) -> bool:
        """Whether a run of this configuration has nothing left to do here."""
        if config.finetune or config.skip_train:
            return False
        if config.train_samples is not None:
            from mb_train.schedule import BatchSizes

            batch = config.global_batch_size or self.saved.config["global_batch_size"]
            sizes = BatchSizes(config, batch)
            done = self.saved.consumed_samples
            return done + sizes.size(done) > config.train_samples
        return self.saved.iteration >= whole(config.train_iters)


@dataclass(frozen=True)
class Resolved:
    """A run to start. `notes` are to be said of it: what differs from the run it goes on from."""

    config: TrainConfig
    start: Start | None = None
    notes: tuple[str, ...] = ()


def find_start(config: TrainConfig) -> Resolved:
    """The run of a whole configuration, which goes on from its `load` if it has one.

    Raises:
        ValueError: no checkpoint where one is to be, or changes that its run cannot survive.
        OSError: files that cannot be read.
    """
    if config.load is None:
        if config.ckpt_step is not None:
            raise ValueError(f"Expected --load with --ckpt-step {config.ckpt_step}, got none.")
        return Resolved(config)
    itself = restarts_itself(config.load, config.save, finetune=config.finetune)
    may_begin = itself and not config.exit_on_missing_checkpoint
    checkpoint = checkpoint_to_load(config.load, config.ckpt_step, may_begin=may_begin)
    if checkpoint is None:
        return Resolved(dataclasses.replace(config, load=None))
    saved = read_saved_run(checkpoint)
    return Resolved(config, Start(checkpoint, saved), tuple(check_changes(saved.config, config)))


def restarts_itself(load: str, save: str | None, *, finetune: bool) -> bool:
    """Whether a run loads from where it saves, as scripts that are run again do from the start.

    One that is to take weights from there has nothing to begin with where there are none: a start
    that was killed had moved them aside, say.
    """
    return save is not None and Path(save) == Path(load) and not finetune


def checkpoint_to_load(load: str, step: int | None, *, may_begin: bool) -> Path | None:
    """The checkpoint to go on from; None for a run that may begin anew, and finds none."""
    path = Path(load)
    if step is not None:
        return checkpoint_of(path, step)
    # Who names one checkpoint, or another program's, means its weights.
    one = is_iteration(path) or path.is_file() or whose(path)
    return (find_checkpoint if may_begin and not one else checkpoint_in)(path)
