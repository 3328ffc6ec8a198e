"""The scan of Mamba-2 beside its plain twin and mamba_ssm's (if it is installed), in turns.

    python packages/mb-kernels/benchmarks/run.py state_space

A call with many small kernels waits for the host, so "kernels_ms" says what its kernels take alone.
Shapes are those of layers of Nemotron 3 Nano, Granite 4 H Tiny and Nemotron Nano 9B v2. "GiB" is
what each takes at its peak beside its arguments, "off" its largest difference from the plain twin,
of y or of any gradient, as a share of the largest number there.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, N width of a state's keys,
P of what a head writes.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mb_kernels import reference, state_space_scan
from timing import eight_of_ten, in_turns, median
from torch import Tensor

SHAPES = {  # B, S, H, G, N, P
    "nemotron-3-nano": (2, 8192, 64, 8, 128, 64),
    "nemotron-3-nano, short": (16, 1024, 64, 8, 128, 64),
    "granite-4-h-tiny": (1, 8192, 48, 1, 128, 64),
    "nemotron-nano-9b-v2": (1, 8192, 128, 8, 128, 80),
}


def make_inputs(B: int, S: int, H: int, G: int, N: int, P: int) -> list[Tensor]:
    """x, b, c, dt, A and D, which want gradients."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, b, c = (torch.randn(B, S, *of, **like) for of in ((H, P), (G, N), (G, N)))
    dt, A = torch.rand(B, S, H, device="cuda") / 10, -16 * torch.rand(H, device="cuda")
    return [t.requires_grad_() for t in (x, b, c, dt, A, torch.ones(H, device="cuda"))]


def peers() -> dict[str, Callable[..., Any]]:
    """mamba_ssm's kernels, in chunks of Nemotron's configuration and of its own default."""
    try:
        theirs = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError:
        return {}

    def in_chunks(size: int) -> Callable[..., Any]:
        def scan(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, A: Tensor, D: Tensor) -> list[Tensor]:
            return [theirs.mamba_chunk_scan_combined(x, dt, A, b, c, size, D=D)]

        return scan

    return {f"mamba_ssm, chunks of {size}": in_chunks(size) for size in (128, 256)}


def calls_of(
    who: str, scan: Callable[..., Any], inputs: list[Tensor], dy: Tensor
) -> dict[str, Any]:
    """Each returns a list of tensors: y, or the gradients of the inputs."""
    return {
        f"{who}, forward": lambda: scan(*inputs)[:1],
        f"{who}, both": lambda: torch.autograd.grad(scan(*inputs)[0], inputs, dy),
    }


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    shares = ((f - w).abs().max() / w.abs().max() for f, w in zip(found, wanted, strict=True))
    return max(share.item() for share in shares)


def peak_gib(call: Callable[[], object]) -> float:
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def kernels_ms(call: Callable[[], object], calls: int = 5) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profiler.key_averages()) / calls / 1000


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name in list(SHAPES)[: 1 if quick else None]:
        inputs = make_inputs(*SHAPES[name])
        dy = torch.randn_like(inputs[0])
        calls: dict[str, Any] = {}
        scans = {"kernels": state_space_scan, "plain": reference.state_space_scan} | peers()
        for who, scan in scans.items():
            calls |= calls_of(who, scan, inputs, dy)
        plain = {what: calls[f"plain, {what}"]() for what in ("forward", "both")}
        times = in_turns(calls)
        yield [
            {"benchmark": "state_space", "shape": name, "what": what,
             "ms": f"{median(found):.3g}", "8_of_10": eight_of_ten(found),
             "kernels_ms": f"{kernels_ms(calls[what]):.3g}",
             "GiB": f"{peak_gib(calls[what]):.2f}",
             "off": f"{error(calls[what](), plain[what.rsplit(', ', 1)[1]]):.1g}"}
            for what, found in times.items()
        ]  # fmt: skip
