"""What recompute, and the host's memory, save and cost in time, on a stack of MoE blocks.

    python packages/mb-parallel/benchmarks/recompute.py [--layers 12] [--batch 32] [--quick]

Blocks of a GPT with 64 SwiGLU experts (hidden 768, 12 heads, ffn 3072, top-1), bf16 under fp32
weights, sequences of 1024. Peak memory is what a pass adds to weights and gradients. A Markdown
table, then one JSON line; some 30 s on an H200. What is kept on the host (`mb_parallel.offload`) is
of as many blocks as the name says.
"""

import argparse
import copy
import gc
import json
import statistics

import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, dMoE
from mb_parallel.offload import Offload, apply_offload
from mb_parallel.recompute import apply_recompute
from torch import nn

HIDDEN, HEADS, FFN, EXPERTS, LENGTH = 768, 12, 3072, 64, 1024
# Name, mode of recompute, of every how many blocks; of how many blocks activations go to the host.
MODES = [
    ("none", None, 1, 0),
    ("selective", "selective", 1, 0),
    ("moe", "moe", 1, 0),
    ("full, every 2nd", "full", 2, 0),
    ("full", "full", 1, 0),
    ("none, 2 on the host", None, 1, 2),
    ("none, 12 on the host", None, 1, 12),
    ("moe, 12 on the host", "moe", 1, 12),
    ("full, 12 on the host", "full", 1, 12),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = dMoE(MoEConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, num_experts=EXPERTS))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x_BSD)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(y.transpose(1, 2).flatten(2))
        return x_BSD + self.moe(self.norms[1](x_BSD)).y


def measure(model: nn.ModuleList, x_BSD: torch.Tensor, steps: int) -> tuple[float, float]:
    """Median ms of forward and backward, and GB that the forward adds at its peak."""
    times, peak = [], 0
    for _ in range(steps + 2):
        model.zero_grad(set_to_none=False)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.autocast("cuda", torch.bfloat16):
            y_BSD = x_BSD
            for block in model:
                y_BSD = block(y_BSD)
        y_BSD.float().square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
        peak = torch.cuda.max_memory_allocated() - before
    return statistics.median(times[2:]), peak / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 1024 tokens")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, sep=", ")
    with torch.device("cuda"):
        plain = nn.ModuleList(Block() for _ in range(arguments.layers))
        x_BSD = torch.randn(arguments.batch, LENGTH, HIDDEN, requires_grad=True)
    rows = []
    print(
        "| recompute | forward and backward, ms | | peak of a pass, GB | |\n|---|---|---|---|---|"
    )
    for name, mode, every, on_host in MODES:
        model = copy.deepcopy(plain)
        if mode is not None:
            apply_recompute(model, mode, every=every)
        if on_host:
            apply_offload(model, Offload(x_BSD.device), count=on_host)
        ms, gigabytes = measure(model, x_BSD, 3 if arguments.quick else 10)
        rows.append({"recompute": name, "ms": round(ms, 2), "GB": round(gigabytes, 3)})
        first = rows[0]
        print(f"| {name} | {ms:.1f} | {ms / first['ms'] - 1:+.0%} | {gigabytes:.2f} | "
              f"{gigabytes / first['GB'] - 1:+.0%} |", flush=True)  # fmt: skip
        del model  # whose blocks refer to themselves: their `forward` is another
        gc.collect()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
