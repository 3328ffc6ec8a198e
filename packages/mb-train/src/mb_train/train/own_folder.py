"""The folder of a run: held for it alone on behalf of all its ranks, and made ready for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

from mb_parallel import of_all_ranks

from mb_train.config import TrainConfig
from mb_train.config.toml_file import to_toml
from mb_train.data.tokenizer_files import copies_for, keep_tokenizer
from mb_train.folder import history, run_folder
from mb_train.folder.lock import HOLDER_FILE, locked
from mb_train.folder.start import Start
from mb_train.folder.whole_files import write_text
from mb_train.machine.rank_zero import on_rank_zero


@contextlib.contextmanager
def only_writer(save: str | None) -> Generator[list[str]]:
    """Hold the lock of the run folder, on rank 0 for all; yield what had to be put right in it.

    Raises:
        ValueError: on all ranks, if another run holds it, or it is no run's.
        OSError: on all ranks, if it cannot be written.
    """
    with contextlib.ExitStack() as held:

        def hold() -> list[str]:
            if save is None:
                return []
            folder = Path(save)
            whole = (folder / run_folder.RUN_FILE).is_file()
            if whole or run_folder.has_name_of_a_checkpoint(folder):
                which = "which is a checkpoint" if whole else "the name of a checkpoint"
                raise ValueError(
                    f"Expected --save to be the folder of a run, got {save}, {which}. Give the "
                    "folder around it, or a new one."
                )
            try:
                held.enter_context(locked(folder))
                return history.recover(folder)
            except OSError as error:
                why = error.strerror or error
                raise OSError(f"Cannot write into --save {save}: {why}.") from None

        yield on_rank_zero(hold) or []


def check_shared(folder: Path) -> None:
    """Raise ValueError on all ranks unless a run folder is one and the same for all of them.

    Each would write its part of a checkpoint into its own.

    Args:
        folder: held by `only_writer`.
    """
    notes = of_all_ranks(_note_in(folder))
    apart = [rank for rank, note in enumerate(notes) if note != notes[0]]
    if apart:
        raise ValueError(
            f"Expected --save {folder} to be one folder for all ranks, got another one on rank "
            f"{apart[0]} than on rank 0. Give one that all nodes mount, by its whole path."
        )


def _note_in(folder: Path) -> str | None:
    """The note of who holds the folder that this rank knows by this name; None without one."""
    with contextlib.suppress(OSError):
        # Where a network file system remembers from a moment ago that it was not there, this asks.
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HOLDER_FILE).exists():
            return (folder / HOLDER_FILE).read_text()
        folder.rmdir()  # it was made by this, or is empty
    return None


def take_over(
    folder: Path, config: TrainConfig, start: Start | None, say: Callable[[str], None]
) -> None:
    """Make the folder this run's, on rank 0: what it does not build on moves aside.

    Args:
        folder: held by `only_writer`.
        start: what the run goes on from.
        say: prints a line.
    """
    copies = copies_for(config, start)
    if start is None or config.finetune or not start.is_in(folder):
        moved = history.set_aside(folder)
        if copies is None or copies.resolve() == folder.resolve():
            copies = moved  # where the tokenizer's files in this folder are now
        if moved is not None:
            say(f" {folder} holds an earlier run: moved to {moved}")
    else:
        moved = history.set_later_aside(folder, start.saved.iteration)
        if moved is not None:
            say(f" going back: the later checkpoints of {folder} moved to {moved}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / run_folder.CONFIG_FILE, to_toml(config))
    keep_tokenizer(config, folder, copies)
