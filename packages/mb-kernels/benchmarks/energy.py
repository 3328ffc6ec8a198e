"""Tokens per joule of a layer, and whether power or waiting limits each of its kernels.

    python packages/mb-kernels/benchmarks/run.py energy [--quick] [--shape olmoe ...]

A chip at its power limit lowers its clock. Then a kernel gets faster if it needs less energy, that
is, moves less data, and not if it waits less. So the table has the time, the watts, the clock and
"busy", the share of what tensor cores could compute at that clock. "zeros" is the time with
operands of zeros, which switch no transistors: about what the kernel would take without a power
limit. Joules are those of the whole board, by NVML (nvidia-ml-py).

Letters: T tokens.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from kernels import kernels
from layer import SHAPES, bmm, make_inputs, ours
from mb_kernels.warm_up import warm_up
from torch import Tensor

# Of a multiprocessor of Hopper, dense 16-bit, per clock.
_FLOPS_PER_CLOCK = 4096
# The counter of joules moves some ten times a second.
_WARM, _OF_KERNELS, _OF_LAYERS = 0.15, 0.3, 1.5


class Draw(NamedTuple):
    """ms and joules of one call, in a row of calls; MHz and watts meanwhile."""

    ms: float
    joules: float
    mhz: float

    @property
    def watts(self) -> float:
        return self.joules / self.ms * 1e3


@functools.cache
def _board() -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties().uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _joules() -> float:
    """The board's counter of joules."""
    nvml, board = _board()
    return nvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1e3


def _repeat(call: Callable[[], object], seconds: float, ms: float) -> tuple[int, float]:
    """Repeat the call for about so long; how many calls, and the median clock."""
    count, clocks = 0, []
    for _ in range(8):
        for _ in range(max(int(seconds * 1e3 / ms / 8), 2)):
            call()
            count += 1
        clocks.append(torch.cuda.clock_rate())  # while the GPU works off what is queued
        torch.cuda.synchronize()
    return count, sorted(clocks)[4]


def drawn(call: Callable[[], object], seconds: float) -> Draw:
    """Time and energy of a call once the chip is warm."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3
    _repeat(call, _WARM, ms)
    joules, start = _joules(), time.perf_counter()
    count, mhz = _repeat(call, seconds, ms)
    took = time.perf_counter() - start
    return Draw(took / count * 1e3, (_joules() - joules) / count, mhz)


def _layers(name: str) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    inputs = make_inputs(shape, "uniform")
    arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    dy = torch.randn_like(inputs["x"])
    per_expert = shape.tokens * shape.top_k // shape.experts
    rows = dy.new_empty((shape.experts, per_expert, shape.hidden)).normal_().requires_grad_()
    weights = dy.new_full((shape.tokens, shape.top_k), 1 / shape.top_k).requires_grad_()

    def both(layer: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(*leaves), leaves, dy)

    found = {
        "bmm": both(bmm(shape), [rows, weights, *arguments[2:]]),
        "mb": both(ours(shape), arguments),
    }
    table = []
    for what, call in found.items():
        draw = drawn(call, _OF_LAYERS)
        table.append(
            {
                **{"benchmark": "energy", "shape": name, "what": what, "ms": f"{draw.ms:.4g}"},
                **{"watts": round(draw.watts), "MHz": round(draw.mhz)},
                "tokens_per_s": round(shape.tokens / draw.ms * 1e3),
                "tokens_per_joule": round(shape.tokens / draw.joules),
            }
        )
    return table


def _kernels(name: str) -> list[dict[str, Any]]:
    peak = torch.cuda.get_device_properties().multi_processor_count * _FLOPS_PER_CLOCK
    found = {what: k for what, k in kernels(SHAPES[name]).items() if k.flops or k.moved > 2**28}
    idle = kernels(SHAPES[name], zeros=True)
    table = []
    for what, kernel in found.items():
        draw = drawn(functools.partial(kernel.launch, kernel.tile), _OF_KERNELS)
        still = drawn(functools.partial(idle[what].launch, kernel.tile), _OF_KERNELS)
        tflops = kernel.flops / draw.ms / 1e9
        table.append(
            {
                **{"benchmark": "energy", "shape": name, "what": what, "ms": f"{draw.ms:.4g}"},
                **{"watts": round(draw.watts), "MHz": round(draw.mhz), "tflops": round(tflops)},
                "busy": round(tflops * 1e6 / (peak * draw.mhz), 3),
                **{"zeros_ms": f"{still.ms:.4g}", "zeros_watts": round(still.watts)},
                "zeros_MHz": round(still.mhz),
            }
        )
    return table


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for shape in SHAPES.values():
        warm_up(
            **{"tokens": shape.tokens, "hidden_size": shape.hidden, "ffn_hidden_size": shape.ffn},
            **{"num_experts": shape.experts, "top_k": shape.top_k, "activation": shape.activation},
        ).result()
    for name in SHAPES:
        yield _kernels(name)
        torch.cuda.empty_cache()
        if not quick:
            yield _layers(name)
            torch.cuda.empty_cache()
