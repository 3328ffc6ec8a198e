"""What each ZeRO stage holds and how long its step takes, with several micro-batches and with one.

    torchrun --nproc_per_node=2 packages/mb-parallel/benchmarks/zero.py [--layers 12] [--ep 2]

Blocks of a GPT with experts (see recompute.py), bf16 compute over fp32 weights, AdamW. "held" is
what lies in memory between two steps, weights and moments; "peak" is the most within a step, of
which activations of a micro-batch are the same part in every row. Both are a rank's. A Markdown
table, then one JSON line; some 40 s on two H200s.
"""

import argparse
import gc
import json
import statistics

import torch
import torch.distributed as dist
from mb_parallel import (
    ParallelDims,
    apply_data_parallel,
    distributed,
    parallelize_experts,
    rank,
    set_gradient_sync,
    world_size,
)
from mb_parallel.optimizer import AdamW, clip_and_step, hold_working_copies
from recompute import HIDDEN, LENGTH, Block
from torch import nn


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return x_BSD


def measure(arguments: argparse.Namespace, stage: int, micro_batches: int) -> dict[str, float]:
    """Milliseconds of a step, GB between steps and at its peak."""
    mesh = ParallelDims.for_world(world_size(), ep=arguments.ep).build("cuda")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Stack(arguments.layers)
        x_BSD = torch.randn(arguments.batch, LENGTH, HIDDEN, dtype=torch.bfloat16)
    parallelize_experts(model, mesh, dispatcher="all_to_all", equal_tokens=True)
    half = torch.bfloat16
    apply_data_parallel(
        model, mesh, blocks=model.blocks, compute_dtype=half, zero_stage=stage,
        keep_fp32=[block.moe.router for block in model.blocks],
    )  # fmt: skip
    copies = hold_working_copies([model], half)
    optimizer = AdamW(model.parameters(), lr=1e-4, working_copies=copies)
    times, held = [], 0
    for step in range(arguments.steps + 2):
        if step == 2:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for m in range(micro_batches):
            set_gradient_sync(model, m == micro_batches - 1)
            model(x_BSD).float().square().mean().backward()
        clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    found = torch.tensor(
        [statistics.median(times[2:]), held / 1e9, torch.cuda.max_memory_allocated() / 1e9]
    )
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(("ms", "held GB", "peak GB"), found.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with distributed("cuda"):
        if rank() == 0:
            print(
                "| ZeRO stage | micro-batches a step | ms a step | held, GB | peak, GB |\n"
                "|---|---|---|---|---|"
            )
        for micro_batches in (4, 1):
            for stage in (1, 2, 3):
                row = measure(arguments, stage, micro_batches)
                gc.collect()
                torch.cuda.empty_cache()
                rows.append({"stage": stage, "micro-batches": micro_batches, **row})
                if rank() == 0:
                    told = " | ".join(f"{value:.1f}" for value in row.values())
                    print(f"| {stage} | {micro_batches} | {told} |", flush=True)
        if rank() == 0:
            name = torch.cuda.get_device_name()
            print(
                json.dumps({"gpu": name, "ranks": world_size(), "ep": arguments.ep, "rows": rows})
            )


if __name__ == "__main__":
    main()
