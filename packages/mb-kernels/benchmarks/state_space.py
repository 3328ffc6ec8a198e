"""The scan of Mamba-2 beside its plain twin, in turns.

    python packages/mb-kernels/benchmarks/run.py state_space

Shapes are those of layers of Nemotron 3 Nano and of Granite 4 H Tiny. "GiB" is what either takes at
its peak beside its arguments.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, N width of a state's keys,
P of what a head writes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from mb_kernels import reference, state_space_scan
from timing import eight_of_ten, in_turns, median
from torch import Tensor

SHAPES = {  # B, S, H, G, N, P
    "nemotron-3-nano": (2, 8192, 64, 8, 128, 64),
    "nemotron-3-nano, short": (16, 1024, 64, 8, 128, 64),
    "granite-4-h-tiny": (1, 8192, 48, 1, 128, 64),
}


def make_inputs(B: int, S: int, H: int, G: int, N: int, P: int) -> list[Tensor]:
    """x, b, c, dt, A and D, which want gradients."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, b, c = (torch.randn(B, S, *of, **like) for of in ((H, P), (G, N), (G, N)))
    dt, A = torch.rand(B, S, H, device="cuda") / 10, -16 * torch.rand(H, device="cuda")
    return [t.requires_grad_() for t in (x, b, c, dt, A, torch.ones(H, device="cuda"))]


def calls_of(who: str, scan: Callable[..., Any], inputs: list[Tensor]) -> dict[str, Any]:
    dy = torch.randn_like(inputs[0])
    return {
        f"{who}, forward": lambda: scan(*inputs),
        f"{who}, both": lambda: torch.autograd.grad(scan(*inputs)[0], inputs, dy),
    }


def peak_gib(call: Callable[[], object]) -> float:
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name in list(SHAPES)[: 1 if quick else None]:
        inputs = make_inputs(*SHAPES[name])
        calls = calls_of("kernels", state_space_scan, inputs)
        calls |= calls_of("plain", reference.state_space_scan, inputs)
        times = in_turns(calls)
        yield [
            {"benchmark": "state_space", "shape": name, "what": what,
             "ms": f"{median(found):.3g}", "8_of_10": eight_of_ten(found),
             "GiB": f"{peak_gib(calls[what]):.2f}"}
            for what, found in times.items()
        ]  # fmt: skip
