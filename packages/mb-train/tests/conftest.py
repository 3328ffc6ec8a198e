"""Runs of this folder lose no power and draw no picture.

What is written need not reach the disk to be read again.

Some file systems take seconds to sync a file, and a checkpoint syncs eight.
"""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    """What a run draws at its end takes longer than its steps: `test_report` looks at pictures."""
    monkeypatch.setattr("mb_train.report.draw", lambda folder: folder / "loss.png")
