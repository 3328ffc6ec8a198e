"""Writing checkpoints: whole or not at all, beside the training if asked, the last few kept.

Every rank writes its shards under a temporary name; when all are on disk, rank 0 renames the folder
and then rewrites the "latest" file, so a run that is killed leaves its previous checkpoint in
force. Asynchronous, only the copy of the state to host memory holds the training up; a thread
writes from the copy, and the loop's `poll` makes the checkpoint the latest once every rank is done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mb_parallel import any_rank, rank, world_size
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from mb_train.checkpoint import Progress, cause_of, tensors_of
from mb_train.run_folder import (
    FORMAT,
    LATEST,
    RUN_FILE,
    SavedRun,
    iteration_folder,
    sync_directory,
    write_text,
)


class Saver:
    """Writes the checkpoints of one run.

    Args:
        folder: the run folder.
        asynchronous: write beside the training. Needs host memory for the state.
        keep: how many checkpoints to keep, the latest ones; None keeps all.
    """

    def __init__(
        self, folder: Path, *, asynchronous: bool = False, keep: int | None = None
    ) -> None:
        self._folder, self._keep = folder, keep
        self._pending: tuple[int, Future[Any]] | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        if asynchronous:
            on_gpu = torch.cuda.is_available()
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,  # its copies are several times faster
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,
                )
            )
            if world_size() > 1:
                # The writing thread's messages must not mix with the training's.
                self._group = dist.new_group(backend="gloo")

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        progress: Progress,
        *,
        config: Mapping[str, Any],
        identity: Mapping[str, Any],
        data: Mapping[str, Any],
    ) -> None:
        """Write one checkpoint from all ranks, or begin to.

        Args:
            optimizer: None leaves its state out.
            config: fields of the run.
            identity: what makes the model this model; a load compares it.
            data: what tells this data from other.

        Raises:
            OSError: not writable, or the disk is full; the previous checkpoint stays in force.
        """
        self.wait()
        draft = self._draft(progress.iteration)
        if rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            run = SavedRun(
                format=FORMAT,
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                config=dict(config),
                identity=dict(identity),
                data=dict(data),
                torch=torch.__version__,
            )
            write_text(draft / RUN_FILE, json.dumps(asdict(run), indent=1) + "\n")
        if world_size() > 1:
            dist.barrier()
        state, writer = tensors_of(model, optimizer), dcp.FileSystemWriter(draft)
        alone = world_size() == 1
        try:
            if self._stager is None:
                dcp.save(state, storage_writer=writer, no_dist=alone)
                self._commit(progress.iteration)
                return
            future = dcp.async_save(
                state,
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._stager,
                no_dist=alone,
            )
        except CheckpointException as error:
            raise OSError(f"Cannot write a checkpoint to {draft}: {cause_of(error)}") from error
        assert isinstance(future, Future)
        self._pending = (progress.iteration, future)

    def poll(self) -> int | None:
        """The iteration whose checkpoint has become the latest since the last call, if any.

        All ranks must call it at the same point.

        Raises:
            OSError: the writing failed.
        """
        if self._pending is None or any_rank(not self._pending[1].done()):
            return None
        return self.wait()

    def wait(self) -> int | None:
        """Let a checkpoint that is being written become the latest; return its iteration."""
        if self._pending is None:
            return None
        iteration, future = self._pending
        self._pending = None
        try:
            future.result()
        except CheckpointException as error:
            draft = self._draft(iteration)
            raise OSError(f"Cannot write a checkpoint to {draft}: {cause_of(error)}") from error
        self._commit(iteration)
        return iteration

    def close(self) -> None:
        """Let go of the threads; call `wait` before for what is being written."""
        if self._stager is not None:
            self._stager.close()

    def _draft(self, iteration: int) -> Path:
        return self._folder / (iteration_folder(iteration) + ".partial")

    def _commit(self, iteration: int) -> None:
        """Rank 0 makes a written draft the latest checkpoint; the others wait for that."""
        if rank() == 0:
            _replace_folder(self._draft(iteration), self._folder / iteration_folder(iteration))
            write_text(self._folder / LATEST, f"{iteration}\n")
            if self._keep is not None:
                for old in checkpoints(self._folder)[: -self._keep]:
                    shutil.rmtree(old)
        if world_size() > 1:
            dist.barrier()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run folder, earliest first."""
    found = [p for p in folder.glob("iter_*") if re.fullmatch(r"iter_\d{7,}", p.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("iter_")))


def _replace_folder(draft: Path, final: Path) -> None:
    """Put a whole folder where an earlier one of that name may be."""
    aside = final.with_name(final.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    os.rename(draft, final)
    sync_directory(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
