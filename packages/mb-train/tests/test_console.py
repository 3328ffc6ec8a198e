"""What is printed while a run is on its way."""

import errno
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from mb_train.cli import main
from mb_train.commands import COMMANDS
from mb_train.logs import console
from mb_train.logs.console import Console
from mb_train.machine.signals import stop_signals
from mb_train.train import Result


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: Clock.now)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "19")
    monkeypatch.setattr(Clock, "now", 100.0)
    return Clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen(written):
    """What stands on a terminal after this."""
    shown = ""
    for chunk in written.split("\r\x1b[2K"):
        shown = shown[: shown.rfind("\n") + 1] + chunk
    return shown


def test_a_terminal_has_one_line_that_is_written_over(clock):
    out = Terminal()
    shown = Console(stream=out)
    shown.say("training ...")
    for step in range(1, 4):
        clock.now += 1
        shown.show(f"iteration {step} of 3 is done")
        assert screen(out.getvalue()) == f"training ...\n  iteration {step} of 3"  # in 19 columns
        clock.now += 0.1
        shown.show("too soon")
    shown.say(" iteration 3")
    assert screen(out.getvalue()) == "training ...\n iteration 3\n"
    clock.now += 1
    shown.show("saving")
    shown.clear()
    assert screen(out.getvalue()) == "training ...\n iteration 3\n"


@pytest.mark.parametrize("terminal", ["file", "dumb"])
def test_a_file_gets_whole_lines_and_few(clock, monkeypatch, terminal):
    out = io.StringIO() if terminal == "file" else Terminal()
    if terminal == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    said = Console(stream=out)
    said.say("training ...")
    for step in range(1, 13):
        clock.now += 1
        said.show(f"iteration {step}")
    said.clear()
    assert out.getvalue() == "training ...\n  iteration 9\n"


def test_other_ranks_are_silent(clock):
    out = Terminal()
    silent = Console(silent=True, stream=out)
    silent.say("one")
    clock.now += 20
    silent.show("two")
    silent.clear()
    assert out.getvalue() == ""


class Failing(io.StringIO):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def flush(self):
        if self.number:
            raise OSError(self.number, "cannot write")


def test_a_full_disk_costs_lines_and_not_the_run():
    out = Failing(errno.ENOSPC)
    said = Console(stream=out)
    said.say("one")
    out.number = 0
    said.say("two")
    assert out.getvalue().endswith("two\n")


def test_a_reader_that_has_gone_is_a_terminal_that_has_closed():
    with stop_signals() as stop:
        said = Console(stream=Failing(errno.EPIPE))
        said.say("one")
        assert stop.reason == "SIGHUP"
        said.say("two")


def test_a_run_in_a_thread_lives_on_without_its_reader():
    """Nothing handles signals for it: one would end the process, and what else runs there."""
    lines = [
        "import sys, threading",
        "from mb_train.logs.console import Console",
        "sys.stdin.readline()",
        "thread = threading.Thread(target=Console().say, args=('said to nobody',))",
        "thread.start()",
        "thread.join()",
        "sys.exit(7)",
    ]
    words, pipe = [sys.executable, "-c", "\n".join(lines)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        process.stdout.close()
        process.stdin.write("\n")
    assert process.returncode > 0  # of no signal


@pytest.mark.parametrize("where", ["write", "flush"])  # more than fits between, or less
def test_a_command_whose_reader_has_gone_ends_without_a_word(monkeypatch, capfd, where):
    def gone(*_):
        raise BrokenPipeError

    out = SimpleNamespace(write=lambda text: None, flush=lambda: None)
    setattr(out, where, gone)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["--print-config"]) == 1
    assert capfd.readouterr() == ("", "")


def test_what_is_said_of_data_does_not_command_the_terminal(monkeypatch, capsys):
    def wrong(parser, arguments):
        raise ValueError("no key '\x1b[2J\u202e'")

    monkeypatch.setitem(COMMANDS, "eval", wrong)
    assert main(["eval"]) == 2
    assert capsys.readouterr().err == "mb-train: no key '\\x1b[2J\\u202e'\n"
    Console().say("\x9b31m\r")
    assert capsys.readouterr().out == "\\x9b31m\\r\n"


def test_too_little_memory_beside_the_gpu_is_one_line(monkeypatch, capsys):
    def large(parser, arguments):
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setitem(COMMANDS, "eval", large)
    assert main(["eval"]) == 2
    assert capsys.readouterr().err.startswith("mb-train: not enough memory: DefaultCPUAllocator: ")


def test_a_pipe_that_breaks_elsewhere_is_said(monkeypatch, capsys):
    def broken(parser, arguments):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setitem(COMMANDS, "eval", broken)
    assert main(["eval"]) == 2
    assert "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["note: ", "mb-train 0.", "stopped after"])
def test_a_full_disk_under_the_lines_of_a_run_loses_them_alone(monkeypatch, tmp_path, capsys, line):
    class Full(io.StringIO):
        def flush(self):
            if line in self.getvalue():
                raise OSError(errno.ENOSPC, "No space left on device")

    result = Result(3, None, None, checkpoint=None, stopped_by=None, diverged=False)
    monkeypatch.setattr("mb_train.train.train", lambda config, start: result)
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["--save", str(tmp_path), "--save-interval", "0", "--use-flash-attn"]) == 0
    assert capsys.readouterr().err == ""


def test_streams_that_are_closed_take_what_is_said():
    """And no file gets their numbers: what libraries print would be in it."""
    program = (
        "import os, sys\nfrom mb_train import cli\nfrom mb_train.logs import console\ndef main():\n"
        "    console.Console().say('one')\n    os.write(1, b'two')\n"
        "    assert os.open('.', os.O_RDONLY) > 2\n    return 5\n"
        "cli.main = main\ncli.program()"
    )
    close = "import os, sys; os.closerange(0, 3); os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-c", close, sys.executable, "-c", program]
    assert subprocess.run(words, check=False).returncode == 5


def test_a_warning_is_a_line():
    """Unless whoever looks for a fault wants its place."""
    program = (
        "import warnings\nfrom mb_train import cli\n"
        "cli.main = lambda: warnings.warn('one\\n two') or 0\ncli.program()"
    )
    words = [sys.executable, "-c", program]

    def said(**more):
        environment = {**os.environ, **more}
        return subprocess.run(words, capture_output=True, text=True, env=environment).stderr

    assert said() == "mb-train: warning: one two\n"
    assert said(MB_TRACEBACK="1").startswith("<string>:3: UserWarning: one\n two\n")


def test_ctrl_c_in_a_command_is_a_line(monkeypatch, capsys):
    def interrupted(parser, arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "eval", interrupted)
    assert main(["eval"]) == 130
    assert capsys.readouterr().err == "mb-train: interrupted\n"


def test_a_copy_that_fails_names_both_files(monkeypatch, capsys):
    def full(parser, arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "here/words", None, "there/words")

    monkeypatch.setitem(COMMANDS, "eval", full)
    assert main(["eval"]) == 2
    assert capsys.readouterr().err == (
        "mb-train: here/words -> there/words: No space left on device\n"
    )


def test_of_several_ranks_the_first_runs_a_command(monkeypatch, capsys):
    """But where WORLD_SIZE counts the nodes of a cluster, on each of which somebody may want it."""
    monkeypatch.setitem(COMMANDS, "eval", lambda parser, arguments: print("evaluated") or 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["eval"]) == 3
    assert capsys.readouterr().out == "evaluated\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["eval"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="mb-train eval runs in one process, rank 0"):
        assert main(["eval"]) == 3
    assert capsys.readouterr().out == "evaluated\n"
