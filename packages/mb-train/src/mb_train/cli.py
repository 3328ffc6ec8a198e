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
import warnings
from collections.abc import Sequence
from typing import NoReturn

from mb_train.commands import COMMANDS, ON_ALL_RANKS
from mb_train.commands.train import train
from mb_train.flags.command_line import parse
from mb_train.flags.parser import run_command
from mb_train.logs.console import in_a_line, out_of_memory
from mb_train.machine.host import alone, before_the_others, called, leads, of_torchrun


def program() -> NoReturn:
    """Run the command line of this process, and end the process with its exit code.

    One of several ranks ends as a process of `multiprocessing` does, without taking the interpreter
    down. gloo's threads outlive the process groups, which caches of torch hold, and one that lets
    go of a tensor while the interpreter goes down aborts the process: torchrun then counts a run
    that is complete as failed, and kills rank 0 (pytorch issue 190489).
    """
    _open_streams()
    if not os.environ.get("MB_TRACEBACK"):
        warnings.formatwarning = _as_a_line  # ty: ignore[invalid-assignment]
    code = main()
    if alone():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            print(end="", file=stream, flush=True)
    os._exit(code)


def _as_a_line(message: Warning | str, *_where: object) -> str:
    return f"{called()}: warning: {in_a_line(Warning(message))}\n"


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
            name, *words = arguments
            if name not in ON_ALL_RANKS and of_torchrun():
                if not leads():
                    return 0
                said = f"mb-train {name} runs in one process, rank 0; the others end."
                warnings.warn(said, stacklevel=1)
            code = run_command(name, COMMANDS[name], words)
        else:
            with before_the_others():
                command = parse(arguments, COMMANDS)
            code = train(command)
        print(end="", flush=True)
        return code
    except KeyboardInterrupt:
        print(f"{called()}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():  # `| head` has seen enough
            sys.stdout = None  # of which Python would complain once more at its end
            return 1
        defect = isinstance(error, RuntimeError) and not out_of_memory(error)
        if defect or os.environ.get("MB_TRACEBACK"):
            raise
        print(f"{called()}: {in_a_line(error)}", file=sys.stderr)
        return 2


def _nobody_reads() -> bool:
    """Whether the pipe that broke is standard output: others may break too."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


if __name__ == "__main__":
    program()
