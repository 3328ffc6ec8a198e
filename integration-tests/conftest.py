"""Fixtures of the end-to-end tests. `tiny_run` is imported from here, wherever pytest starts."""

import sys
from pathlib import Path

import pytest
from mb_parallel.testing import preload

sys.path.insert(0, str(Path(__file__).parent))

import tiny_run

preload("mb_train.train.loop", "mb_train.commands.train", "mb_train.report.pictures")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small token file."""
    return tiny_run.write_tokens(tmp_path_factory.mktemp("tokens"))
