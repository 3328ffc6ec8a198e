"""No test of this folder loses power: what is written need not reach the disk to be read again.

Some file systems take seconds to sync a file, and a checkpoint syncs eight.
"""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
