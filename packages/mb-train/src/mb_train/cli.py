"""`mb-train`: train, or `mb-train generate RUN`, `mb-train report RUN`, `mb-train doctor`.

Wrong input ends with one line on stderr and exit code 2. torch is imported only once the command
line makes sense, so that `--help` and typing errors answer at once.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mb_train import __version__
from mb_train.commands import COMMANDS
from mb_train.config import TrainConfig
from mb_train.flags.command_line import parse, run_command, without_effect
from mb_train.folder.run_folder import LOG_FILE, PICTURE, recover
from mb_train.machine.host import leads, prepare_host
from mb_train.starting import Start, command_line, plan

if TYPE_CHECKING:
    from mb_train.train import Result


def program() -> NoReturn:
    """Run the command line of this process, and end the process with its exit code.

    One of several ranks ends as a process of `multiprocessing` does, without taking the interpreter
    down. gloo's threads outlive the process groups, which caches of torch hold, and one that lets
    go of a tensor while the interpreter goes down aborts the process: torchrun then counts a run
    that is complete as failed, and kills rank 0 (pytorch issue 190489).
    """
    _open_streams()
    code = main()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            print(end="", file=stream, flush=True)
    os._exit(code)


def _open_streams() -> None:
    """Open standard streams that were closed by who started this: what is said there is lost.

    The next file would get the number of a closed one, and in it the lines that libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # has the lowest free number, which is its own
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", errors="replace"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 1 if the run diverged or lost a process that reads its data, its end is
        not saved or nobody reads what is said, 2 for bad input or too little memory, 130 after a
        Ctrl-C that ends it at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # No run ends for a letter that its output has not; a configuration is to be read again.
    if isinstance(sys.stdout, io.TextIOWrapper) and "--print-config" not in arguments:
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments and arguments[0] in COMMANDS:
            code = run_command(arguments[0], COMMANDS[arguments[0]], arguments[1:])
        else:
            code = _train(arguments)
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        print("mb-train: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():  # `| head` has seen enough
            sys.stdout = None  # of which Python would complain once more at its end
            return 1
        defect = isinstance(error, RuntimeError) and not _out_of_gpu_memory(error)
        if defect or os.environ.get("MB_TRACEBACK"):
            raise
        print(f"mb-train: {_in_a_line(error)}", file=sys.stderr)
        return 2


def _nobody_reads() -> bool:
    """Whether the pipe that broke is standard output: others may break too."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def _in_a_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    said = str(error)
    if _out_of_gpu_memory(error):
        said = " ".join(["not enough memory:", said, *getattr(error, "__notes__", ())])
    return " ".join(said.split())


def _out_of_gpu_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # without it there is no GPU
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _train(arguments: list[str]) -> int:
    command = parse(arguments, COMMANDS)
    started = plan(command)
    config = started.config
    if command.print_config:
        from mb_train.tasks.architecture import checked_toml

        print(checked_toml(config), end="")
        return 0
    leader = leads()
    if leader:
        idle = without_effect(command, config)
        for note in (*command.notes, *idle, *started.notes):
            _tell(f"note: {note}")
    if started.start is not None and started.start.is_end_of(config):
        if leader:
            _complete(started.start, config)
        return 0
    prepare_host()
    if leader:
        _tell(f"mb-train {__version__}: {_headline(config)}")
    from mb_train.train import train

    result = train(config, started.start)
    if leader:
        try:
            _close(config, result)
            print(end="", flush=True)
        except BrokenPipeError:
            raise
        except OSError:  # of a full disk a run loses lines, and no more
            sys.stdout = None
    return result.exit_code(config)


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
    from mb_train.folder.lock import locked

    with contextlib.suppress(OSError), locked(folder):  # a folder that is another's to write
        for line in recover(folder):
            print(f" {line}")
        if not (folder / PICTURE).exists():
            print(f" picture              {_picture(folder)}")


def _headline(config: TrainConfig) -> str:
    kind = "a dense" if config.moe_num_experts is None else "a Mixture-of-Experts"
    length = f"{config.train_samples} samples"
    if not config.by_samples:
        length = f"{config.train_iters} steps"
    return f"{kind} {config.model.upper()}, {length}, to {config.save or 'nowhere'}"


def _close(config: TrainConfig, result: Result) -> None:
    """The last lines of a run: what came out of it and where it lies."""
    from mb_train.logs.reporting import perplexity

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
        # A name that begins with a dash would be taken for a flag.
        path = f"./{folder}" if str(folder).startswith("-") else str(folder)
        print(f" go on with           {command_line('--load', path)}")


def _picture(folder: Path) -> str:
    from mb_train.report.pictures import draw

    try:
        return str(draw(folder))
    except Exception as error:  # a full disk, a bad MPLBACKEND: the run is over all the same
        return f"none: {_in_a_line(error)}"


if __name__ == "__main__":
    program()
