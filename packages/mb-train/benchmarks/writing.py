"""What a checkpoint's writing takes from the steps beside it, on the CPU, and how long it takes.

    python packages/mb-train/benchmarks/writing.py [--gb 3] [--folder /dev/shm] [--rounds 2]

A rank of a dMoE whose state is in memory: few large tensors and many small ones. The main thread
does what a step does that the host can hardly keep up with: operations of 9 us, for which it lets
go of the interpreter's lock, and 21 us of Python between them. Beside it a `Saver` writes, by turns
with `Writer` and with torch's own way (a file at a time, summed by a thread that reads it again).

"lost" is what the steps took longer until the checkpoint was whole, without what they waited for a
core (Linux's schedstat): that depends on who else is on the machine. "handovers": how often another
thread than the main one waited, for the lock mostly. Needs three times `--gb` of memory, `--folder`
included. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from mb_train.checkpoint import writer
from mb_train.checkpoint.read import Progress
from mb_train.checkpoint.saver import Saver
from mb_train.folder.checksums import sum_of
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

X = torch.ones(65536)


class TorchsWriter(writer.Writer):
    """The baseline."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        results, sums = [], {}
        with ThreadPoolExecutor(1) as beside:
            for number, (_, items) in enumerate(writer._files(plan)):
                prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
                piece = replace(plan, items=items, storage_data=prefix)
                written = dcp.FileSystemWriter.write_data(self, piece, planner).wait()
                name = written[0].storage_data.relative_path
                sums[name] = beside.submit(sum_of, Path(self.path) / name)
                results += written
        results += [WriteResult(MetadataIndex(n), 0, one.result()) for n, one in sums.items()]
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(results)
        return future


WRITERS = {"torch's": TorchsWriter, "ours": writer.Writer}


def state(gb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW: experts of 151 MB, and 100 small parameters."""
    large = [torch.rand(16, 768, 3072) for _ in range(max(1, round(gb / 3 / 0.151)))]
    model = nn.Module()
    model.p = nn.ParameterList([*large, *(torch.rand(20_000) for _ in range(100))])
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {k: torch.rand_like(p) for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p]["step"] = torch.tensor(1.0)
    return model, optimizer


def step() -> None:
    """About 20 ms."""
    for _ in range(700):
        torch.mul(X, X)
        for _ in range(2500):
            pass


def seconds() -> float:
    """That pass for this thread while it has a core or waits for a lock."""
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.perf_counter() - int(waited) / 1e9


def handovers() -> dict[str, int]:
    """How often each other thread has waited, by its number."""
    counts = {}
    for thread in Path("/proc/self/task").iterdir():
        if thread.name == str(threading.get_native_id()):
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = (thread / "status").read_text()
            counts[thread.name] = int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return counts


def measure(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """One asynchronous save and the steps beside it."""
    saver = Saver(folder, asynchronous=True)
    for _ in range(10):
        step()
    begun = seconds()
    for _ in range(50):
        step()
    alone = (seconds() - begun) / 50
    saver.save(model, optimizer, Progress(1, 1), config={}, identity={}, data={})
    counts, before, steps = {}, handovers(), 0
    wall, begun = time.perf_counter(), seconds()
    while not saver.poll():
        step()
        steps += 1
        counts |= handovers()
    beside = (seconds() - begun) / steps
    whole = time.perf_counter() - wall
    saver.close()
    return {
        "gb": sum(p.stat().st_size for p in folder.glob("iter_*/*")) / 1e9,
        "whole_s": whole,
        "alone_ms": 1e3 * alone,
        "beside_ms": 1e3 * beside,
        "lost_s": steps * (beside - alone),
        "handovers": sum(counts.values()) - sum(before.values()),
    }


def main() -> None:
    """Measure both by turns and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=3.0)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = state(options.gb)
    rows = []
    head = f"{'writer':10}{'GB':>6}{'whole s':>9}{'alone ms':>10}{'beside ms':>11}"
    print(f"{head}{'lost s':>8}{'handovers':>11}", flush=True)
    for name in [*WRITERS] * options.rounds:
        writer.Writer = WRITERS[name]
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            row = measure(folder, model, optimizer)
        finally:
            shutil.rmtree(folder)
        print(
            f"{name:10}{row['gb']:6.1f}{row['whole_s']:9.1f}{row['alone_ms']:10.1f}"
            f"{row['beside_ms']:11.1f}{row['lost_s']:8.2f}{row['handovers']:11.0f}",
            flush=True,
        )
        rows.append({"writer": name, **row})
    print(json.dumps({"torch": torch.__version__, "folder": options.folder, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
