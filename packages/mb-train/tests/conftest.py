"""Runs of this folder lose no power, draw no picture and collect no garbage.

What is written need not reach the disk to be read again.

Some file systems take seconds to sync a file, and a checkpoint syncs eight.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from mb_parallel.testing import preload

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))
preload("mb_train.train.loop", "mb_train.commands.train", "mb_train.report.pictures")


@pytest.fixture(autouse=True, scope="session")
def _signals_come():
    """Under nohup, and in a shell's background, some are ignored, and by what a test starts too."""
    for name, handler in (("SIGHUP", signal.SIG_DFL), ("SIGINT", signal.default_int_handler)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Of all that tests have imported: it takes longer than the steps of a run."""
    monkeypatch.setattr("mb_train.train.loop.leave_out_of_collections", gc.freeze)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    """What a run draws at its end takes longer than its steps: `test_report` looks at pictures."""
    monkeypatch.setattr("mb_train.report.pictures.draw", lambda folder: folder / "loss.png")
