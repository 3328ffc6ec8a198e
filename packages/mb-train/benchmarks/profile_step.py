"""Where the GPU time of a training step goes: the largest kernels, their calls and milliseconds.

    python packages/mb-train/benchmarks/profile_step.py [dense] [dmoe] [olmoe]
    torchrun --nproc_per_node 2 packages/mb-train/benchmarks/profile_step.py peer all_gather

Shapes as in run.py: GPT-2 125M, 64 sequences of 1024, compiled; `dmoe` has 64 top-1 experts in
every layer; `olmoe` has 16 sequences. One step after a warm-up, by torch's profiler; under torchrun
the experts are spread over the GPUs by the dispatcher that is named, and rank 0 prints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

import run as benchmark
import torch
from mb_parallel import distributed, rank, world_size
from torch.profiler import ProfilerActivity, profile

WARM_UP, ROWS = 4, 34


def print_profile(step: Callable[[], None], tokens: int) -> dict[str, float]:
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    host_ms = 1000 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    wall_ms = 1000 * (time.perf_counter() - begun)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1000
    print(f"{tokens} tokens: {wall_ms:.1f} ms, host {host_ms:.1f} ms, kernels {total:.1f} ms")
    for row in rows[:ROWS]:
        print(f"{row.self_device_time_total / 1000:9.2f} ms {row.count:5d}  {row.key[:110]}")
    return {"tokens_per_s": tokens / wall_ms * 1000}


def main() -> None:
    benchmark.time_steps = print_profile
    with (
        distributed("cuda"),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(sys.stdout if rank() == 0 else nowhere),
    ):
        for case in sys.argv[1:] or ("dense", "dmoe"):
            print(f"\n{case}")
            if case == "olmoe":
                benchmark.our_olmoe()
                continue
            change = {} if case == "dense" else dict(benchmark.PAPER)
            if world_size() > 1 and case != "dense":
                change |= {"expert_model_parallel_size": world_size(), "moe_dispatcher": case}
            benchmark.ours(64, compiled=True, ranks=world_size(), **change)


if __name__ == "__main__":
    main()
