"""What benchmarks of whole runs share: random tokens, and a run whose lines are kept back."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import mb_data
import numpy as np
from mb_train.cli import main

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
    return [
        "--data-path", str(path), "--split", "100,0,0", "--tokenizer", "gpt2", "--eval-iters", "0",
        "--log-interval", "1", "--save-interval", "0", "--save", f"{path}-run",
    ]  # fmt: skip


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
