"""`mb-train` with the flags of a run: what is said before it and after it, and the run between.

torch is imported only once there is something to train, so that typing errors answer at once.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mb_train import __version__
from mb_train.config import TrainConfig, whole
from mb_train.flags.command_line import CommandLine
from mb_train.flags.starting import resolve_start
from mb_train.folder.run_folder import LOG_FILE, PICTURE
from mb_train.folder.start import Start
from mb_train.logs.console import in_a_line
from mb_train.machine.host import alone, before_the_others, first_import, leads, prepare_host
from mb_train.machine.signals import stop_signals
from mb_train.words import counted, typed

if TYPE_CHECKING:
    from mb_train.train import Result


def train(command: CommandLine) -> int:
    """Train; the exit code is `Result.exit_code`'s."""
    with before_the_others():
        started = resolve_start(command)
    config = started.config
    if command.print_config:
        return print_config(config)
    leader = leads()
    if leader:
        tell_notes(started.notes)
    if started.start is not None and started.start.is_end_of(config):
        if not alone():  # others may have found another checkpoint, and wait for this rank
            from mb_train.train import joined

            with joined(config, started.start):
                pass
        if leader:
            _complete(started.start, config)
        return 0
    prepare_host()
    if leader:
        _tell(f"mb-train {__version__}: {_headline(config)}")
    with first_import():
        from mb_train.train import train

    result = train(config, started.start)
    if leader:
        # All is saved: whoever asks for that once more must not have the run look as if it died.
        with stop_signals():
            try:
                _close(config, result)
                print(end="", flush=True)
            except BrokenPipeError:
                raise
            except OSError:  # of a full disk a run loses lines, and no more
                sys.stdout = None
    return result.exit_code(config)


def print_config(config: TrainConfig) -> int:
    """What `--print-config` asks for, in place of a run; raises as `checked_toml`."""
    from mb_train.tasks.architecture import checked_toml

    print(checked_toml(config), end="")
    return 0


def tell_notes(notes: Iterable[str]) -> None:
    """Remarks on a run, before it starts."""
    for note in notes:
        _tell(f"note: {note}")


def _tell(line: str) -> None:
    """Print a line before there is a `Console`, which takes a full disk in the same way."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # of a full disk a run loses lines, and no more
        pass


def _complete(start: Start, config: TrainConfig) -> None:
    """Of a run that is at its end: what a kill may have kept it from, after its last checkpoint."""
    folder = start.run
    print(f"{start.checkpoint} is at iteration {start.saved.iteration}, the end of this run.")
    if config.save is None or Path(config.save) != folder:
        return
    from mb_train.folder.history import recover
    from mb_train.folder.lock import locked

    with contextlib.suppress(OSError), locked(folder):  # a folder that is another's to write
        for line in recover(folder):
            print(f" {line}")
        if not (folder / PICTURE).exists():
            print(f" picture              {_picture(folder)}")


def _headline(config: TrainConfig) -> str:
    kind = "a dense" if config.moe_num_experts is None else "a Mixture-of-Experts"
    if config.skip_train:
        return f"{kind} {config.model.upper()}, evaluated from {config.load}"
    unit, number = "sample", config.train_samples
    if not config.by_samples:
        unit, number = "step", config.train_iters
    length = counted(whole(number), unit)
    return f"{kind} {config.model.upper()}, {length}, to {config.save or 'nowhere'}"


def _close(config: TrainConfig, result: Result) -> None:
    """The last lines of a run: what came out of it and where it lies."""
    from mb_train.logs.megatron_lines import perplexity

    if config.skip_train:
        return  # it was said
    print(f"\n stopped after iteration {result.iteration}")
    if result.first_loss is not None:
        print(f" first training loss  {result.first_loss:.4f}")
    if result.valid_loss is not None:
        ppl = perplexity(result.valid_loss)
        print(f" validation loss      {result.valid_loss:.4f}  (PPL {ppl:.2f})")
    if config.save is None:
        print(" nothing was kept: no --save")
        return
    folder = Path(config.save)
    kept = str(result.checkpoint) if result.checkpoint else "none, as --save-interval 0 says"
    if result.unsaved(config):
        kept = f"{result.checkpoint}, the latest there is" if result.checkpoint else "none"
        kept = f"{kept}: the end of the run could not be saved"
    print(f" checkpoint           {kept}")
    print(f" picture              {_picture(folder)}")
    print(f" log                  {folder / LOG_FILE}")
    if result.checkpoint is not None:
        print(f" go on with           {invocation('--load')} {typed(folder)}")


def _picture(folder: Path) -> str:
    from mb_train.report.pictures import draw

    try:
        return str(draw(folder))
    except Exception as error:  # a full disk, a bad MPLBACKEND: the run is over all the same
        return f"none: {in_a_line(error)}"


def invocation(*arguments: str) -> str:
    """What to type to call this program again, the way it was called, quoted for a shell."""
    words = ["mb-train"]
    if Path(sys.argv[0]).name == "__main__.py":
        words = ["python", "-m", "mb_train"]
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if "TORCHELASTIC_RUN_ID" in os.environ:
            nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
            spread = [] if nodes == "1" else ["--nnodes", nodes]
            words = ["torchrun", *spread, "--nproc_per_node", ranks, "-m", "mb_train"]
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # set by `uv run`, and by nothing else
        words = ["uv", "run", *words]
    return shlex.join([*words, *arguments])
