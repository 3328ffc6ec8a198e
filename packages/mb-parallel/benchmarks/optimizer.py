"""The optimizer step of billions of expert weights: ours in one pass against torch's parts.

    python packages/mb-parallel/benchmarks/optimizer.py [--layers 12] [--muon]

Twelve layers of 64 SwiGLU experts of width 2048 under a hidden size of 768, with attention and
embeddings: 3.7 B parameters. 90 GB of memory; fewer layers need less. Calls run in turns, so each
meets the clocks that the others leave. GB/s counts the bytes that a step cannot do without: each
gradient for the norm, then gradient, weight, moments and copy once each. Last, what a further
micro-batch adds. A table, then one JSON line.
"""

import argparse
import gc
import json
import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
from mb_kernels import accumulate_grad
from mb_parallel.optimizer import AdamW, Muon, WorkingCopies, clip_and_step
from torch import nn
from turns import in_turns

HIDDEN, FFN, EXPERTS, VOCABULARY = 768, 2048, 64, 50304
DEVICE = "cuda"
RATES = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

Steps = dict[str, tuple[Callable[[], object], int]]
"""What is timed, with the bytes of a parameter that it has to move."""


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
        made.append(nn.Parameter(torch.randn(shape, device=DEVICE, dtype=dtype) * 0.02))
        made[-1].grad = torch.randn(shape, device=DEVICE, dtype=dtype)
    return made


@torch.no_grad()
def torchs(optimizer: torch.optim.Optimizer, copies: list[torch.Tensor] | None) -> None:
    """What a trainer calls: norm and clip, fused step, the cast of the next forward."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    torch._foreach_mul_([p.grad for p in parameters], (1.0 / (norm + 1e-6)).clamp(max=1.0))
    optimizer.step()
    if copies is not None:
        torch._foreach_copy_(copies, parameters)


def one_by_one(stacks: list[nn.Parameter]) -> list[nn.Parameter]:
    """Each matrix of stacks a parameter in their memory: torch's Muon takes no stack."""
    matrices = []
    for stack in stacks:
        size = (-1, *stack.shape[-2:])
        for weight, grad in zip(stack.detach().view(size), stack.grad.view(size), strict=True):
            matrices.append(nn.Parameter(weight))
            matrices[-1].grad = grad
    return matrices


@torch.no_grad()
def torchs_muon(optimizers: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    torch._foreach_mul_([p.grad for p in parameters], (1.0 / (norm + 1e-6)).clamp(max=1.0))
    for optimizer in optimizers:
        optimizer.step()


def muons(layers: int) -> Steps:
    """Muon's step for the blocks' matrices, AdamW's for the rest; and without its iteration."""
    parameters = make(layers, torch.float32)
    matrices = [p for p in parameters[2:] if p.ndim > 1 and p.shape != (EXPERTS, HIDDEN)]
    taken = set(matrices)
    rest = [p for p in parameters if p not in taken]
    whole, without = (
        Muon([{"params": matrices, "muon": True}, {"params": rest}], lr=1e-4, weight_decay=0.1)
        for _ in range(2)
    )
    without.param_groups[0]["ns_steps"] = 0  # which the constructor refuses: it does not train
    whole.step()
    without.state = whole.state
    torchs = [
        torch.optim.Muon(
            one_by_one(matrices), lr=1e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, **RATES, fused=True),
    ]
    clip = partial(clip_and_step, max_norm=1.0)
    return {"torch: norm, clip, Muon matrix by matrix, fused AdamW": (
                partial(torchs_muon, torchs, parameters), 28),
            "Muon": (partial(clip, whole), 28),
            "Muon without its iteration": (partial(clip, without), 28)}  # fmt: skip


def with_fp32_moments(layers: int) -> Steps:
    parameters = make(layers, torch.float32)
    pairs = copied(parameters)
    fused = torch.optim.AdamW(parameters, **RATES, fused=True)
    ours, copying = AdamW(parameters, **RATES), AdamW(parameters, **RATES, working_copies=pairs)
    fused.step()
    # One set of fp32 moments serves all: their values do not matter here.
    ours.state = copying.state = fused.state
    clip = partial(clip_and_step, max_norm=1.0)
    return {
        "torch: norm, clip, fused AdamW": (partial(torchs, fused, None), 32),
        "torch: norm, clip, fused AdamW, cast to bf16": (
            partial(torchs, fused, list(pairs.values())), 34),
        "ours": (partial(clip, ours), 32),
        "ours, with the bf16 copy": (partial(clip, copying), 34),
    }  # fmt: skip


def with_bf16_moments(layers: int) -> Steps:
    parameters = make(layers, torch.float32)
    half = AdamW(parameters, **RATES, state_dtype=torch.bfloat16, working_copies=copied(parameters))
    half.step()
    return {"ours, bf16 moments and copy": (partial(clip_and_step, half, max_norm=1.0), 26)}


def all_but_masters_in_bf16(layers: int) -> Steps:
    half = AdamW(make(layers, torch.bfloat16), **RATES, state_dtype=torch.bfloat16)
    half.step()
    name = "ours, bf16 weights over fp32 masters, bf16 gradients and moments"
    return {name: (partial(clip_and_step, half, max_norm=1.0), 22)}


def gradients_of_micro_batches(layers: int) -> Steps:
    """A bf16 gradient added to an fp32 sum, and to another bf16 gradient in fp32."""
    sums = [torch.randn(shape, device=DEVICE) for shape in shapes(layers)]
    first, second = ([total.bfloat16() for total in sums] for _ in range(2))

    def torchs(totals: list[torch.Tensor]) -> None:
        for total, grad in zip(totals, second, strict=True):
            total.float().add_(grad)

    def ours(totals: list[torch.Tensor]) -> None:
        for total, grad in zip(totals, second, strict=True):
            accumulate_grad(total, grad)

    return {
        "torch: gradients of a micro-batch, added": (partial(torchs, sums), 10),
        "ours, added": (partial(ours, sums), 10),
        "torch: those of the first two": (partial(torchs, first), 8),
        "ours, of the first two": (partial(ours, first), 8),
    }


def copied(parameters: list[nn.Parameter]) -> WorkingCopies:
    return WorkingCopies({p: p.detach().bfloat16() for p in parameters})


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
    numbers = sum(math.prod(shape) for shape in shapes(arguments.layers))
    print(f"{numbers / 1e9:.2f} B parameters in {len(shapes(arguments.layers))} tensors")
    rows: list[dict[str, object]] = []
    adamw = [with_fp32_moments, with_bf16_moments, all_but_masters_in_bf16]
    adamw.append(gradients_of_micro_batches)
    for make_steps in (muons,) if arguments.muon else adamw:
        calls = make_steps(arguments.layers)
        times = in_turns({name: call for name, (call, _) in calls.items()}, arguments.rounds)
        for name, (_, bytes_each) in calls.items():
            ms = statistics.median(times[name])
            rate = numbers * bytes_each / ms / 1e6
            rows.append({"step": name, "ms": round(ms, 2), "min": round(min(times[name]), 2),
                         "bytes": bytes_each, "GB/s": round(rate)})  # fmt: skip
            print(f"{name:52} {ms:8.2f} ms  (min {min(times[name]):.2f})  "
                  f"{bytes_each} B a parameter, {rate:.0f} GB/s", flush=True)  # fmt: skip

        del calls  # and its weights, before the next are made
        gc.collect()
    print(json.dumps({"machine": machine, "parameters": numbers, "rows": rows}))


if __name__ == "__main__":
    main()
