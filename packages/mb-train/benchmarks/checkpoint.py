"""How long a checkpoint holds the training up, and what it costs the steps after it.

    python packages/mb-train/benchmarks/checkpoint.py [--ways device host at-once] [--folder DIR]
        [--recipe dmoe-125m] [--steps 31] [FLAGS]

Trains a recipe (3.7 B parameters) and saves once, after the twentieth step: beside the training
from a copy on the device, beside it from a copy in host memory, at once. The stall is the time the
loop spends in saving; the loss is the time of the ten steps after it over that of the ten before,
and that of all until the checkpoint is whole, as far as `--steps` goes. A checkpoint is 8 syncs and
its bytes, so what the disk takes for one and for the other is said first; a way takes as long as
the disk needs for 44 GB (`--num-layers 3` for less). Random tokens; further flags go to the run.
Prints each row when it is known, then one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from mb_train.checkpoint.snapshot import Snapshots
from mb_train.folder.run_folder import LATEST, read_saved_run
from mb_train.logs.run_log import read_log
from mb_train.train import loop
from small_runs import end_at_sigterm, random_tokens, train

AT = 20
# Flags of the run, and whether a copy lies on the device; None: if it fits.
WAYS: dict[str, tuple[list[str], bool | None]] = {
    "device": (["--async-save"], None),
    "host": (["--async-save"], False),
    "at-once": ([], None),
}


def disk(folder: Path) -> dict[str, float]:
    """ms of a sync of a small file, the median of five; GB/s of 512 MiB written and synced."""
    file, times = folder / "probe", []
    for size in (*[4096] * 5, 512 * 2**20):
        content = os.urandom(size)
        begun = time.perf_counter()
        with file.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        times.append(time.perf_counter() - begun)
    file.unlink()
    return {"sync_ms": 1e3 * statistics.median(times[:5]), "gb_per_s": size / times[5] / 1e9}


def measure(folder: Path, flags: list[str]) -> dict[str, float]:
    """What `of_steps` measures, seconds until the checkpoint is whole, and its size."""
    # 1 says that the end is in no checkpoint, as is meant here.
    train([*flags, f"--save={folder}", f"--save-interval={AT}"], 1)
    size = sum(p.stat().st_size for p in folder.glob("iter_*/*")) / 1e9
    begun = read_saved_run(folder / f"iter_{AT:07d}").written
    whole = (folder / LATEST).stat().st_mtime - begun
    return {**of_steps(folder, whole), "whole_s": whole, "gb": size}


def of_steps(folder: Path, whole: float = math.inf) -> dict[str, float]:
    """Seconds of stall, mean ms of ten steps before and after, what they and all until whole lost.

    Args:
        whole: seconds from the beginning of the save to its end.
    """
    times, stall = {}, None
    for event in read_log(folder / "log.jsonl"):
        if event["event"] == "train":
            times[event["iteration"]] = event["ms_per_iteration"]
        elif event["event"] == "save" and event["iteration"] == AT:
            stall = event["seconds"]
    assert stall is not None
    before = statistics.mean(times[i] for i in range(AT - 9, AT + 1))
    later = [times[i] for i in sorted(times) if i > AT]
    after = statistics.mean(later[:10])
    ends = itertools.accumulate(later, initial=1000 * stall)
    beside = [ms for ms, begun in zip(later, ends, strict=False) if begun < 1000 * whole]
    lost = {
        "lost": 1 - before / after,
        "lost_until_whole": 1 - before / statistics.mean(beside or later),
    }
    return {"stall_s": stall, "before_ms": before, "after_ms": after, "beside": len(beside), **lost}


def main() -> None:
    """Measure the three ways and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="dmoe-125m")
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    parser.add_argument("--steps", type=int, default=AT + 11)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options, rest = parser.parse_known_args()
    save, on_device = loop.save, WAYS["device"][1]

    def save_once(run: Any, **how: Any) -> Any:
        """At the end the thread may still be writing: what the steps took is known already."""
        if run.progress.iteration == AT:
            run.saver.snapshots = Snapshots(on_device=on_device)
            save(run, **how)
        elif run.progress.iteration == run.iterations:
            sys.__stdout__.write(f"{of_steps(run.folder)}, perhaps being written\n")
            sys.__stdout__.flush()

    loop.save = save_once
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        end_at_sigterm(Path(folder))
        speed = disk(Path(folder))
        print(f"disk: {speed['sync_ms']:.1f} ms a sync, {speed['gb_per_s']:.2f} GB/s", flush=True)
        data = random_tokens(Path(folder) / "random")
        head = f"{'':10}{'stall s':>9}{'whole s':>9}{'before ms':>11}{'after ms':>10}"
        print(f"{head}{'lost':>8}{'of all':>8}{'steps':>7}{'GB':>8}", flush=True)
        for name in options.ways:
            flags, on_device = WAYS[name]
            run = Path(folder) / name
            words = [f"--recipe={options.recipe}", *data, f"--train-iters={options.steps}"]
            words += [*flags, *rest]
            row = {"name": name, **measure(run, words)}
            shutil.rmtree(run)
            print(
                f"{name:10}{row['stall_s']:9.2f}{row['whole_s']:9.1f}{row['before_ms']:11.1f}"
                f"{row['after_ms']:10.1f}{row['lost']:8.1%}{row['lost_until_whole']:8.1%}"
                f"{row['beside']:7d}{row['gb']:8.1f}",
                flush=True,
            )
            rows.append(row)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"device": device, "recipe": options.recipe, "disk": speed, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
