"""What benchmarks of whole runs share: random tokens, a run whose lines are kept back, an end."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from pathlib import Path

import mb_data
import numpy as np
from mb_train.cli import main
from mb_train.machine.signals import StopFlag
from mb_train.train import loop

# Lines of a failed run that are shown.
_TOLD = 15


def random_tokens(path: Path, count: int = 4_000_000) -> list[str]:
    """Make a data set of random tokens below 50,000; the flags of a run on it.

    No evaluation, a line for every step, nothing but a log in the run's folder.
    """
    generator = np.random.default_rng(0)
    with mb_data.IndexedDatasetBuilder(path, np.uint16) as builder:
        for _ in range(64):
            builder.add_document(generator.integers(0, 50_000, count // 64, dtype=np.uint16))
    return [*_flags(path), "--tokenizer", "gpt2"]


def _flags(path: Path) -> list[str]:
    return [
        "--data-path", str(path), "--split", "100,0,0", "--eval-iters", "0", "--log-interval", "1",
        "--save-interval", "0", "--save", f"{path}-run",
    ]  # fmt: skip


def random_sentences(path: Path) -> list[str]:
    """The same for models of sentences, of 64 to 96 random tokens in documents of 24."""
    generator = np.random.default_rng(0)
    with mb_data.IndexedDatasetBuilder(path, np.uint16) as builder:
        for _ in range(2000):
            lengths = generator.integers(64, 96, 24)
            tokens = generator.integers(1000, 30_000, lengths.sum(), dtype=np.uint16)
            builder.add_document(tokens, lengths)
    return [*_flags(path), "--tokenizer", "bert-base-uncased"]


def end_at_sigterm(folder: Path) -> None:
    """From here on SIGTERM ends the process at once, and removes a folder. Runs do not see it.

    A run would save first, and its writing thread be waited for.
    """

    def end(*_: object) -> None:
        subprocess.Popen(["rm", "-rf", str(folder)], start_new_session=True)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    loop.stop_signals = lambda: contextlib.nullcontext(StopFlag())


def train(words: list[str], expected: int = 0) -> None:
    """Run mb-train in this process without a word; its last lines if its exit code is another."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(words)
        if code != expected:
            raise SystemExit(f"mb-train {' '.join(words)}: exit code {code}")
    except BaseException:
        print("\n".join(said.getvalue().splitlines()[-_TOLD:]), flush=True)
        raise
