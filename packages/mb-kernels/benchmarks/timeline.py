"""The time of each kernel within a layer's step, by torch's profiler, beside its lower bound.

    python packages/mb-kernels/benchmarks/run.py timeline [--quick] [--shape olmoe ...]

Forward and backward run over and over, so that caches, clock and power are those of real steps;
`kernels` flushes the L2 cache instead. "floor" is the longer of a product's FLOPs at 790 TFLOP/s
and a kernel's bytes at 4.3 TB/s, each operand counted once. "tiled": TFLOP/s if the rows that fill
up tiles of 128 are counted too, or for weight gradients those that fill up steps of 64.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from layer import SHAPES, Shape, make_inputs, ours
from mb_kernels import bin_tokens, topk_softmax
from mb_kernels.warm_up import warm_up
from timing import median
from torch.autograd import DeviceType

_FLOPS, _BYTES = 790e12, 4.3e12
# In the order of a step; "schedule" and what comes before it, and small sums, are "routing".
_KERNELS = {
    "spread_kernel": ("spread x", "spread do", "spread x again"),
    "up_fwd_kernel": ("up",),
    "grouped_gemm_kernel": ("down", "dx"),
    "dact_bwd_kernel": ("dact",),
    "grouped_outer_kernel": ("dw2", "dw1"),
    "combine_fwd_kernel": ("combine", "combine dx"),
}


def _costs(shape: Shape) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each kernel that has some worth naming."""
    tokens, rows = shape.tokens * shape.hidden, shape.tokens * shape.top_k * shape.hidden
    h, a = (shape.tokens * shape.top_k * n for n in (shape.columns, shape.ffn))
    w1, w2 = (shape.experts * shape.hidden * n for n in (shape.columns, shape.ffn))
    up, down = 2.0 * h * shape.hidden, 2.0 * a * shape.hidden
    moved = {name: (0.0, tokens + rows) for names in ("spread_kernel", "combine_fwd_kernel")
             for name in _KERNELS[names]}  # fmt: skip
    products = {
        "up": (up, rows + w1 + h + a),
        "down": (down, a + w2 + rows),
        "dact": (down, rows + w2 + 2 * h + a),
        "dw2": (down, rows + a + w2),
        "dx": (up, h + w1 + rows),
        "dw1": (up, h + rows + w1),
    }
    return {name: (flops, 2.0 * elements) for name, (flops, elements) in (moved | products).items()}


def _filled(shape: Shape) -> tuple[float, float]:
    """Rows that tiles of 128 and steps of 64 compute, of the rows there are."""
    ids = topk_softmax(make_inputs(shape, "uniform")["logits"].detach(), shape.top_k)[1]
    counts = bin_tokens(ids, shape.experts).tokens_per_expert_E.double()
    tiles, steps = (((counts / n).ceil() * n).sum() / counts.sum() for n in (128, 64))
    return tiles.item(), steps.item()


def _step(shape: Shape, steps: int) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of each kernel in each of ``steps`` steps, and of a step in all."""
    inputs = make_inputs(shape, "uniform")
    arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    layer, dy = ours(shape), torch.randn_like(inputs["x"])

    def step() -> None:
        torch.autograd.grad(layer(*arguments), arguments, dy)

    for _ in range(max(steps, 3)):
        step()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    named: dict[str, list[float]] = {}
    routing = 0.0
    for kernel, values in times.items():
        per_step = len(values) // steps
        for place, name in enumerate(_KERNELS.get(kernel, ())[:per_step]):
            named[name] = sorted(values[place::per_step])
        routing += 0.0 if kernel in _KERNELS else sum(values) / steps
    named["routing"] = [routing]
    return named, start.elapsed_time(end) / steps


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    steps = 10 if quick else 30
    for shape in SHAPES.values():
        sizes = {"tokens": shape.tokens, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn}
        warm_up(
            **sizes, num_experts=shape.experts, top_k=shape.top_k, activation=shape.activation
        ).result()
    for name, shape in SHAPES.items():
        times, whole = _step(shape, steps)
        tiles, depth = _filled(shape)
        costs, table = _costs(shape), []
        for what, values in times.items():
            ms = median(values)
            flops, moved = costs.get(what, (0.0, 0.0))
            floor = max(flops / _FLOPS, moved / _BYTES) * 1e3
            row = {"ms": f"{ms:.4g}", "floor": f"{floor:.3g}", "GB/s": round(moved / ms / 1e6)}
            if flops:
                tflops = flops / ms / 1e9
                row["tflops"] = round(tflops)
                row["tiled"] = round(tflops * (depth if what.startswith("dw") else tiles))
            table.append({"benchmark": "timeline", "shape": name, "what": what, **row})
        kernels = sum(median(values) for values in times.values())
        row = {"ms": f"{whole:.4g}", "kernels": f"{kernels:.4g}"}
        row["tflops"] = round(shape.flops / whole / 1e9)
        yield [*table, {"benchmark": "timeline", "shape": name, "what": "step", **row}]
        torch.cuda.empty_cache()
