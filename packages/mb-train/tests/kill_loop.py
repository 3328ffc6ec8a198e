"""kill -9 at random moments, while saving too: what is left is a run that goes on to the bit.

    python packages/mb-train/tests/kill_loop.py --kills 100 [--async-save]

A small run saves after every step and is killed again and again; each start loads from where it
saves, as a script that restarts itself would. Three kills of four come within a second after the
run has got to work (its folder has changed), the others at any moment of its start. At the end
every loss, taken before or after any kill, equals that of a run which was left alone, and every
checkpoint there is sums up.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TINY = [
    "--recipe=quickstart", "--num-layers=1", "--hidden-size=16", "--ffn-hidden-size=16",
    "--seq-length=16", "--num-attention-heads=1", "--micro-batch-size=2", "--moe-num-experts=2",
    "--moe-top-k=1", "--lr-decay-iters=100", "--eval-iters=1", "--eval-interval=5",
    "--log-interval=1", "--num-workers=0", "--device=cpu", "--split=90,10,0", "--save-interval=1",
    "--keep-checkpoints=3", "--tokenizer=null:500",
]  # fmt: skip


SUFFIXES = (".partial", ".surplus")  # of what is half-written or half-deleted


def make_data(path: Path) -> None:
    import mb_data
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 500, (200, 64), dtype=np.uint16)
    with mb_data.IndexedDatasetBuilder(path, dtype=np.uint16) as builder:
        for document in tokens:
            builder.add_document(document)


def start(words: list[str], output: str) -> None:
    """A run in this process, its output to a file."""
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch
    from mb_train.cli import main

    torch.set_num_threads(1)
    sys.exit(main(words))


def losses(folder: Path) -> dict[int, float]:
    from mb_train.logs.run_log import read_log

    found = {}
    for event in read_log(folder / "log.jsonl"):
        if event["event"] == "train":
            found[event["iteration"]] = event["lm_losses"][-1]
    return found


@dataclass
class Met:
    """What the kills met, in numbers: runs starting, at work, and of those in the midst of a save;
    and how many runs came to their end in between."""

    starting: int = 0
    working: int = 0
    saving: int = 0
    ended: int = 0


def at_work(run: Path) -> list[tuple[str, int]]:
    """What a run changes as it works: its checkpoints, whole or not."""
    found = []
    for path in run.glob("iter_*"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.stat().st_mtime_ns))
    return sorted(found)


def kill_loop(folder: Path, *, kills: int, iterations: int, seed: int, words: list[str]) -> Met:
    """Returns what the kills met. Raises AssertionError."""
    from mb_train.folder.checksums import damage, read_sums
    from mb_train.folder.run_folder import checkpoints

    random.seed(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mb_train.train", "mb_train.cli", "mb_train.report.pictures"])
    make_data(folder / "text")
    common = [*TINY, *words, "--data-path", str(folder / "text"), "--train-iters", str(iterations)]
    output = folder / "output"

    def begin(save: Path):
        argv = [*common, "--save", str(save), "--load", str(save)]
        process = context.Process(target=start, args=(argv, str(output)))
        process.start()
        return process

    alone = begin(folder / "alone")
    alone.join()
    assert alone.exitcode == 0, output.read_text()
    expected = losses(folder / "alone")
    assert sorted(expected) == list(range(1, iterations + 1))

    met, run = Met(), folder / "killed-0"
    for _ in range(kills):
        before = at_work(run)
        process = begin(run)
        if random.random() < 0.25:
            process.join(random.uniform(0.0, 2.0))
        else:
            while process.is_alive() and at_work(run) == before:
                process.join(0.02)
            process.join(random.uniform(0.0, 1.0))
        if process.is_alive():
            process.kill()
            process.join()
            met.working += at_work(run) != before
            met.starting += at_work(run) == before
            met.saving += any(run.glob("iter_*.partial"))
        else:
            assert process.exitcode == 0, output.read_text()[-3000:]
            assert losses(run) == expected
            met.ended += 1
            run = folder / f"killed-{met.ended}"
    last = begin(run)
    last.join()
    assert last.exitcode == 0, output.read_text()[-3000:]
    assert losses(run) == expected
    for path in folder.glob("killed-*"):
        left = [p.name for p in path.iterdir() if p.suffix in SUFFIXES]
        assert not left, left
        for checkpoint in checkpoints(path):
            sums = read_sums(checkpoint / "SHA256SUMS")
            assert damage(checkpoint, sums, sums) == []
    return met


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    options = parser.parse_args()
    words = ["--async-save"] if options.async_save else []
    with tempfile.TemporaryDirectory() as folder:
        met = kill_loop(
            Path(folder), kills=options.kills, iterations=options.iterations, seed=options.seed,
            words=words,
        )  # fmt: skip
    print(
        f"{met.starting} kills met a run that was starting, {met.working} one at work, "
        f"{met.saving} of them in the midst of a save; {met.ended + 1} runs came to their end, all "
        "losses equal to the bit"
    )


if __name__ == "__main__":
    main()
