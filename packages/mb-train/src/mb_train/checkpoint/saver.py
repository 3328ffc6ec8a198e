"""Writing checkpoints: whole or not at all, beside the training if asked, the last few kept.

Every rank writes its shards under a temporary name and sums them up; when all are on disk, rank 0
renames the folder and then rewrites the "latest" file, so a run that is killed leaves its previous
checkpoint in force. One that is there is not replaced: what a run does not build on it has moved
aside before it began (`folder.history`). A save that fails (the disk is full, there is no memory
for a copy) is said, leaves nothing behind, and does not end the run. Weights that are not numbers
are not saved: the latest checkpoint is always one to go on from.

Asynchronous, the training waits only for a copy of the state (`snapshot`). A thread does the rest,
and whatever waits for a disk: the syncs of a checkpoint take seconds on some. The loop's `poll`
tells when every rank is done.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mb_parallel import any_rank, rank, world_size
from mb_parallel.mesh import keep_timeout
from mb_parallel.optimizer import local
from torch import Tensor

from mb_train.checkpoint.finite import all_finite
from mb_train.checkpoint.host_copy import use_stream
from mb_train.checkpoint.read import Progress, cause_of, quiet
from mb_train.checkpoint.snapshot import Snapshots
from mb_train.checkpoint.tensors import Modules, Optimizer, parts_of, tensors_of
from mb_train.folder.history import delete, withdraw
from mb_train.folder.run_folder import (
    FORMAT,
    LATEST,
    PARTIAL,
    SavedRun,
    checkpoints,
    iteration_folder,
    iteration_of,
    read_saved_run,
)
from mb_train.logs.megatron_lines import saved_line, saving_line


class Saver:
    """Writes the checkpoints of one run. All ranks call its methods at the same points.

    Args:
        folder: the run folder.
        asynchronous: write beside the training. Needs memory for a second copy of the state.
        keep: how many checkpoints to keep, those written last; None keeps all.
        retain: keep those of every so many steps beside them.
        say: takes a line to print.
        snapshots: takes the copies that are written beside the training.

    Attributes:
        latest: iteration of the last checkpoint that was written whole; None before the first.
        snapshots: see above; another may take its place between two saves.
    """

    def __init__(
        self,
        folder: Path,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
        retain: int | None = None,
        say: Callable[[str], None] = lambda line: None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._folder, self._keep, self._retain, self._say = folder, keep, retain, say
        self.latest: int | None = None
        self._bytes = 0  # of this rank in the checkpoint under way
        self._written: float | None = None  # when the last checkpoint was, not known yet
        self._pending: tuple[int, Future[None]] | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.snapshots = snapshots or Snapshots()
        if asynchronous:
            import mb_train.checkpoint.writer  # noqa: F401 (now, and not beside the steps)

            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="saver", initializer=use_stream, initargs=(_stream(),)
            )
            if world_size() > 1:
                # The writing thread's messages must not mix with the training's.
                self._group = dist.new_group(backend="gloo")
                keep_timeout([self._group])

    def save(
        self,
        model: Modules,
        optimizer: Optimizer,
        progress: Progress,
        *,
        config: Mapping[str, Any],
        identity: Mapping[str, Any],
        data: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write one checkpoint from all ranks, or begin to.

        Args:
            model: this rank's module, or its parts of a pipeline, named as in the whole model.
            optimizer: None leaves its state out.
            config: fields of the run.
            identity: what makes the model this model; a load compares it.
            data: what tells this data from other.
            state: small values to go on with, put into run.json.

        Returns:
            False if nothing was, or is being, written: `say` has been told why, and the previous
            checkpoint stays in force.
        """
        self.wait()
        iteration = progress.iteration
        self._say(saving_line(iteration, self._folder))
        if not all_finite(p for part in parts_of(model) for p in part.parameters()):
            self._say(
                f" not saved: at iteration {iteration} the weights are not numbers. "
                f"{self.in_force()}"
            )
            return False
        run = SavedRun(
            format=FORMAT,
            iteration=iteration,
            consumed_samples=progress.consumed_samples,
            config=dict(config),
            identity=dict(identity),
            data=dict(data),
            torch=torch.__version__,
            written=self._now(),
            state=dict(state or {}),
        )
        tensors = tensors_of(model, optimizer)
        self._bytes = sum(map(_local_bytes, tensors.values()))
        snapshot: dict[str, Tensor] = {}

        def prepare() -> None:
            if rank() == 0:
                self._begin(iteration)
            if self._thread is not None:
                snapshot.update(self.snapshots.take(tensors))

        try:
            problem = _attempt(prepare)
            if any_rank(problem is not None):
                return self._failed(iteration, problem or "another rank failed")
            if self._thread is None:
                problem = _attempt(lambda: self._write(run, tensors, {}))
                return self._finish(iteration, problem)
        except BaseException:  # a Ctrl-C, the loss of another rank: it ends the run
            self._discard(iteration)
            raise
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        self._pending = iteration, self._thread.submit(self._write, run, tensors, snapshot, copied)
        return True

    def poll(self) -> bool:
        """Whether a checkpoint has become the latest since the last call."""
        if self._pending is None or any_rank(not self._pending[1].done()):
            return False
        return self.wait()

    def wait(self) -> bool:
        """Let a checkpoint that is being written become the latest; whether there was one."""
        if self._pending is None:
            return False
        iteration, future = self._pending
        self._pending = None
        return self._finish(iteration, _attempt(future.result))

    def close(self) -> None:
        """End the writing thread, after what it has to do, and those that copy; leave its group.

        After an error ranks do not meet in `wait`: each tells of a checkpoint what itself knows.
        """
        if self._thread is None:
            return
        try:
            if self._pending is not None:
                (iteration, future), self._pending = self._pending, None
                try:
                    problem = _attempt(future.result)
                except RuntimeError as error:  # of a lost rank, say: it hides not what ends the run
                    problem = f"{type(error).__name__}: {error}"
                self._conclude(iteration, problem)
        finally:
            self._thread.shutdown()
            self.snapshots.close()
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _draft(self, iteration: int) -> Path:
        return self._folder / (iteration_folder(iteration) + PARTIAL)

    def _begin(self, iteration: int) -> None:
        final = self._folder / iteration_folder(iteration)
        if final.exists():
            raise FileExistsError(errno.EEXIST, "A checkpoint of this iteration is there", final)
        draft = self._draft(iteration)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)

    def _discard(self, iteration: int) -> None:
        if rank() == 0:
            shutil.rmtree(self._draft(iteration), ignore_errors=True)

    def _write(
        self,
        run: SavedRun,
        tensors: Mapping[str, Tensor],
        snapshot: Mapping[str, Tensor],
        copied: torch.cuda.Event | None = None,
    ) -> None:
        """Write this rank's shards; rank 0 writes what is about all of them, and commits.

        Args:
            run: what is said of the run.
            tensors: this rank's.
            snapshot: of their shards, by name; empty: they are written as they are.
            copied: after this the snapshot is what it should be.
        """
        import torch.distributed.checkpoint as dcp

        from mb_train.checkpoint.writer import Planner, Writer

        try:
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
            with quiet():
                dcp.save(
                    dict(tensors),
                    storage_writer=Writer(self._draft(run.iteration), run),
                    planner=Planner(snapshot),
                    process_group=self._group,
                    no_dist=world_size() == 1,
                )
        except Exception as error:  # of this rank alone: what torch tells all is none
            self._hang_up(error)
            raise

    def _hang_up(self, error: Exception) -> None:
        """Have the other writing threads learn that this one has failed.

        They wait for it, and their ranks for them, before these close the connections by which the
        training would learn. This group's close when nothing holds it, frames of `error` neither.
        """
        if self._group is not None:
            traceback.clear_frames(error.__traceback__)
            dist.destroy_process_group(self._group)
            self._group = None

    def _finish(self, iteration: int, problem: str | None) -> bool:
        """Say what became of a checkpoint, equal on all ranks."""
        if any_rank(problem is not None):
            problem = problem or "another rank failed"
        return self._conclude(iteration, problem)

    def _conclude(self, iteration: int, problem: str | None) -> bool:
        if problem is not None:
            return self._failed(iteration, problem)
        self.latest = iteration
        self._say(saved_line(iteration, self._folder))
        if rank() == 0 and self._keep is not None:
            with contextlib.suppress(OSError):  # what cannot be listed now goes with a later save
                self._remove(surplus(self._folder, self._keep, self._retain))
        return True

    def _remove(self, checkpoints: list[Path]) -> None:
        for old in checkpoints:
            with contextlib.suppress(OSError):
                withdrawn = withdraw(old)
                if self._thread is None:
                    delete(withdrawn)
                else:
                    self._thread.submit(delete, withdrawn)

    def _now(self) -> float:
        """The time, later than that of the checkpoints that are there: by it the last are known.

        The clock that those are of may have been put back, or another host's.
        """
        if self._written is None:
            here: list[Path] = []
            if rank() == 0:
                with contextlib.suppress(OSError):  # what cannot be listed is no reason not to save
                    here = checkpoints(self._folder)
            self._written = max(map(_written, here), default=0.0)
        self._written = max(time.time(), math.nextafter(self._written, math.inf))
        return self._written

    def _failed(self, iteration: int, problem: str) -> bool:
        with contextlib.suppress(OSError):  # the folder is gone, or cannot be reached
            free = shutil.disk_usage(self._folder).free
            if free < self._bytes:
                problem = f"{free / 1e9:.3g} GB are free for {self._bytes / 1e9:.3g} GB; {problem}"
        self._discard(iteration)
        self._say(f" could not save iteration {iteration}: {problem}. {self.in_force()}")
        return False

    def in_force(self) -> str:
        """Which checkpoint a run would go on from, in words."""
        latest = self._folder / LATEST
        try:
            return f"The latest checkpoint is that of iteration {latest.read_text().strip()}."
        except (FileNotFoundError, NotADirectoryError):
            return "There is no checkpoint yet."
        except OSError as error:  # the disk that takes no checkpoint may give none either
            return f"Cannot read {latest}: {error.strerror}."


def surplus(folder: Path, keep: int, retain: int | None = None) -> list[Path]:
    """The checkpoints to remove so that the `keep` written last stay, and the one in force.

    Those of every `retain` steps stay, too.
    """
    by_age = sorted(checkpoints(folder), key=lambda path: (_written(path), path.name))
    latest = folder / LATEST
    in_force = iteration_folder(int(latest.read_text())) if latest.is_file() else None
    old = (path for path in by_age[:-keep] if path.name != in_force)
    return [path for path in old if retain is None or iteration_of(path) % retain]


def _written(checkpoint: Path) -> float:
    try:
        return read_saved_run(checkpoint).written
    except ValueError:  # damaged: the first to go
        return -1.0


def _attempt(action: Callable[[], Any]) -> str | None:
    """None, or in words what kept the action from ending well.

    Raises:
        KeyboardInterrupt: as `cause_of`.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        action()
    except CheckpointException as error:
        return cause_of(error)
    except (OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _local_bytes(tensor: Tensor) -> int:
    shard = local(tensor)
    return shard.numel() * shard.element_size()


def _stream() -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if torch.cuda.is_available() else None
