"""The folder of a run, held for it alone on behalf of all its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import torch.distributed as dist
from mb_parallel import rank, world_size

from mb_train.folder import history, run_folder
from mb_train.folder.lock import locked


@contextlib.contextmanager
def only_writer(save: str | None) -> Generator[list[str]]:
    """Hold the lock of the run folder, on rank 0 for all; yield what had to be put right in it.

    Raises:
        ValueError: on all ranks, if another run holds it, or it is no run's.
        OSError: on all ranks, if it cannot be written.
    """
    with contextlib.ExitStack() as held:
        done: list[str] = []
        failure: list[Exception | None] = [None]
        if save is not None and rank() == 0:
            try:
                if (Path(save) / run_folder.RUN_FILE).is_file():
                    raise ValueError(
                        f"Expected --save to be the folder of a run, got {save}, which is a "
                        "checkpoint. Give the folder around it, or a new one."
                    )
                held.enter_context(locked(Path(save)))
                done = history.recover(Path(save))
            except ValueError as error:
                failure = [error]
            except OSError as error:
                failure = [OSError(f"Cannot write into --save {save}: {error.strerror or error}.")]
        if world_size() > 1:
            dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise failure[0]
        yield done
