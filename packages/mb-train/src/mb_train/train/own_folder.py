"""The folder of a run: held for it alone on behalf of all its ranks, and made ready for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

from mb_train.config import TrainConfig
from mb_train.config.toml_file import to_toml
from mb_train.data.tokenizer_files import copies_for, keep_tokenizer
from mb_train.folder import history, run_folder
from mb_train.folder.lock import locked
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
            if (Path(save) / run_folder.RUN_FILE).is_file():
                raise ValueError(
                    f"Expected --save to be the folder of a run, got {save}, which is a "
                    "checkpoint. Give the folder around it, or a new one."
                )
            try:
                held.enter_context(locked(Path(save)))
                return history.recover(Path(save))
            except OSError as error:
                why = error.strerror or error
                raise OSError(f"Cannot write into --save {save}: {why}.") from None

        yield on_rank_zero(hold) or []


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
