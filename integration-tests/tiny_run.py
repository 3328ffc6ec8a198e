"""A tiny run for end-to-end tests: token files that can be learned, and flags for a small model."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mb_data
import mb_train.report.pictures
import mb_train.train.loop
import numpy as np
import pytest
from mb_train.cli import main

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 48 --seq-length 16"
)
MOE = "--moe-num-experts 4 --moe-top-k 2 --moe-loss-weight 0.05 --activation swiglu"
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 3e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --lr-decay-iters 8 --log-interval 2 --eval-interval 4 --eval-iters 2 "
    "--split 80,20,0 --device cpu --tokenizer null:1000"  # GPT-2's 50,304 rows: 2/3 of a run
)


def write_tokens(folder: Path, documents: int = 40) -> str:
    """Random walks over 30 of 1000 tokens, so that the next is easy to guess: the prefix."""
    prefix = folder / "walks"
    rng = np.random.default_rng(0)
    with mb_data.IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            steps = rng.integers(1, 4, size=rng.integers(20, 60))
            builder.add_document((rng.integers(30) + np.cumsum(steps)) % 30)
    return str(prefix)


def layouts_asked(request: pytest.FixtureRequest) -> set[str]:
    """The parameters `layout` of those tests of this module that were selected."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return {call["layout"] for call in calls if "layout" in call}


def slow_but(always: Collection[str], layouts: Iterable[str]) -> list[Any]:
    """The layouts as parameters of a test, those that are not tried always marked slow."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n not in always)) for n in layouts]


def flags(prefix: str, save: Path | None = None, *more: str, moe: bool = True) -> list[str]:
    """The command line of a tiny run; `more` wins over what it repeats."""
    words = [*MODEL.split(), *(MOE.split() if moe else []), *TRAINING.split()]
    words += ["--data-path", prefix]
    if save is not None:
        words += ["--save", str(save)]
    return words + [word for text in more for word in text.split()]


def collect() -> None:
    """What a run of a test collects at its end: nothing, unless a test has it do so."""


def train(arguments: Sequence[str]) -> int:
    """`mb_train`'s exit code; it draws no picture and collects no garbage, each of which takes
    longer than the steps of a tiny run, and waits for no disk, as what is written need not outlive
    the machine to be read again."""
    with (
        patch.object(mb_train.train.loop, "leave_out_of_collections", gc.freeze),
        patch.object(mb_train.train.loop, "collect_meshes", collect),
        patch.object(mb_train.report.pictures, "draw", lambda folder: folder / "no picture"),
        patch.object(os, "fsync", lambda descriptor: None),
    ):
        return main(arguments)


def on_a_rank(rank: int, world_size: int, lines: list[list[str]]) -> tuple[list[str], str]:
    """What each line failed with, "" for none, and all that was printed."""
    failed, out = [], io.StringIO()
    for arguments in lines:
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = train(arguments)
        failed.append(err.getvalue() if code else "")
    return failed, out.getvalue()


def torchrun(arguments: list[str], ranks: int = 2) -> None:
    """Run `mb_train` on several ranks of this machine, as people do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "mb_train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(run: Path) -> list[float]:
    """Training loss of every iteration in the order of the log."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [loss for event in events if event["event"] == "train" for loss in event["lm_losses"]]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Events of one kind in the order of the log."""
    lines = (run / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
