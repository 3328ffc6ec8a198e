"""What several test files look at, and what makes them independent of each other."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from mb_data import IndexedDataset

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def reads_pages_one_by_one() -> Callable[[Any], bool]:
    """Whether the system was told that neighbours of a dataset's samples are not wanted."""

    def look(dataset: Any) -> bool:
        try:
            maps = Path("/proc/self/smaps").read_text()
        except FileNotFoundError:  # Linux alone tells
            return True
        name, found = f"{Path(dataset.indexed.prefix).resolve()}.bin", []
        for line in maps.splitlines():
            if line.startswith("VmFlags:") and found and found[-1] is None:
                found[-1] = " rr" in line
            elif line.endswith(name):
                found.append(None)
        return bool(found) and all(found)

    return look


@pytest.fixture(autouse=True)
def _count_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, and so inherit what a test patches, if the test itself starts no thread.

    Tests of other packages may have left idle threads in this process.
    """
    count = threading.active_count
    left_behind = count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - left_behind)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small SentencePiece model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sp") / "toy.model"
    text = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen jugs"] * 20
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=file, vocab_size=37, minloglevel=2
        )
    return path


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    """Documents of sentences."""
    from sentence_helpers import random_documents, write

    return write(tmp_path / "d", random_documents(0))


@pytest.fixture
def may_open() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Within `may_open(n)` this process may have only so many more files open."""
    resource = pytest.importorskip("resource")  # which Windows has not

    @contextlib.contextmanager
    def limited(more: int) -> Generator[None]:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)  # the next file gets the lowest number that is free
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    return limited
