"""The optimizer step of billions of expert weights: ours in one pass against torch's parts.

    python packages/mb-parallel/benchmarks/optimizer.py [--layers 12] [--muon]

Twelve layers of 64 SwiGLU experts of width 2048 under a hidden size of 768, with attention and
embeddings: 3.7 B parameters. 90 GB of memory; fewer layers need less. Calls run in turns, so each
meets the clocks that the others leave. GB/s counts the bytes that a step cannot do without: each
gradient for the norm, then gradient, weight, moments and copy once each. A table, then one JSON
line.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
from mb_parallel.optimizer import AdamW, Muon, WorkingCopies, clip_and_step, describe
from torch import nn

HIDDEN, FFN, EXPERTS, VOCABULARY = 768, 2048, 64, 50304


def shapes(layers: int) -> list[tuple[int, ...]]:
    block = [
        (EXPERTS, 2 * FFN, HIDDEN),
        (EXPERTS, HIDDEN, FFN),
        (EXPERTS, HIDDEN),
        (3 * HIDDEN, HIDDEN),
        (HIDDEN, HIDDEN),
        *[(HIDDEN,)] * 5,
        (3 * HIDDEN,),
    ]
    return [(VOCABULARY, HIDDEN), (1024, HIDDEN), *block * layers]


def make(layers: int, dtype: torch.dtype) -> list[nn.Parameter]:
    made = []
    for shape in shapes(layers):
        made.append(nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02))
        made[-1].grad = torch.randn(shape, device="cuda", dtype=dtype)
    return made


def torchs(optimizer: torch.optim.Optimizer, copies: list[torch.Tensor] | None) -> None:
    """What a trainer calls: norm and clip, fused step, the cast of the next forward."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    torch._foreach_mul_([p.grad for p in parameters], (1.0 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    if copies is not None:
        torch._foreach_copy_(copies, [p.detach() for p in parameters])


def muons(parameters: list[nn.Parameter]) -> dict[str, tuple[Callable[[], object], int]]:
    """Muon's step for the blocks' matrices, AdamW's for the rest; and without its iteration."""
    matrices = [p for p in parameters[2:] if p.ndim > 1 and p.shape != (EXPERTS, HIDDEN)]
    taken = set(matrices)
    rest = [p for p in parameters if p not in taken]
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    state = None
    for name, steps in {"Muon": 5, "Muon without its iteration": 0}.items():
        groups = [{"params": matrices, "muon": True}, {"params": rest}]
        muon = Muon(groups, lr=1e-4, weight_decay=0.1, ns_steps=steps)
        if state is None:
            muon.step()
            state = muon.state
        muon.state = state
        calls[name] = (partial(clip_and_step, muon, max_norm=1.0), 28)
    return calls


def in_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--muon", action="store_true", help="Muon instead, on the same weights")
    arguments = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(*machine.values(), sep=", ")
    rows: list[dict[str, object]] = []

    def measure(calls: dict[str, tuple[Callable[[], object], int]], numbers: int) -> None:
        times = in_turns({name: call for name, (call, _) in calls.items()}, arguments.rounds)
        for name, (_, bytes_each) in calls.items():
            ms = statistics.median(times[name])
            rate = numbers * bytes_each / ms / 1e6
            rows.append({"step": name, "ms": round(ms, 2), "min": round(min(times[name]), 2),
                         "bytes": bytes_each, "GB/s": round(rate)})  # fmt: skip
            print(f"{name:52} {ms:8.2f} ms  (min {min(times[name]):.2f})  "
                  f"{bytes_each} B a parameter, {rate:.0f} GB/s", flush=True)  # fmt: skip

    parameters = make(arguments.layers, torch.float32)
    numbers = sum(p.numel() for p in parameters)
    print(f"{numbers / 1e9:.2f} B parameters in {len(parameters)} tensors")
    if arguments.muon:
        measure(muons(parameters), numbers)
        print(json.dumps({"machine": machine, "parameters": numbers, "rows": rows}))
        return
    copies = [p.detach().bfloat16() for p in parameters]
    pairs = WorkingCopies(dict(zip(parameters, copies, strict=True)))
    rates = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    fused = torch.optim.AdamW(parameters, **rates, fused=True)
    ours, copying = AdamW(parameters, **rates), AdamW(parameters, **rates, working_copies=pairs)
    fused.step()
    # One set of fp32 moments serves all: their values do not matter here.
    ours.state = copying.state = fused.state
    clip = partial(clip_and_step, max_norm=1.0)
    measure(
        {
            "torch: norm, clip, fused AdamW": (partial(torchs, fused, None), 32),
            "torch: norm, clip, fused AdamW, cast to bf16": (partial(torchs, fused, copies), 34),
            "ours": (partial(clip, ours), 32),
            "ours, with the bf16 copy": (partial(clip, copying), 34),
        },
        numbers,
    )
    del fused, ours, copying
    half = AdamW(parameters, **rates, state_dtype=torch.bfloat16, working_copies=pairs)
    half.step()
    print(describe(half))
    measure({"ours, bf16 moments and copy": (partial(clip, half), 26)}, numbers)
    del half, pairs, copies, parameters
    torch.cuda.empty_cache()
    parameters = make(arguments.layers, torch.bfloat16)
    half = AdamW(parameters, **rates, state_dtype=torch.bfloat16)
    half.step()
    print(describe(half))
    name = "ours, bf16 weights over fp32 masters, bf16 gradients and moments"
    measure({name: (partial(clip, half), 22)}, numbers)
    print(json.dumps({"machine": machine, "parameters": numbers, "rows": rows}))


if __name__ == "__main__":
    main()
