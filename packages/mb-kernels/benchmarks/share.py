"""Matrix kernels while another kernel occupies a part of the GPU: fixed or dynamic shares of tiles.

    python packages/mb-kernels/benchmarks/run.py share [--quick]

Each kernel runs alone, and beside a kernel that occupies 16 multiprocessors until the first has
ended, as a collective that waits for its peer does. "static": as many programs as the chip holds at
once, each with a fixed share of the tiles. "8" and so on: programs that end after at most 8 tiles,
see `Plan.programs`. "of_static" is the best time of a row over that of "static" alone; "floor" is
the same ratio for a chip of the remaining multiprocessors. All variants of a kernel take turns, see
`timing`.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from kernels import Kernel, kernels
from layer import SHAPES
from mb_kernels.runtime.plan import Plan, assume, plan_of
from timing import in_turns, median
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HELD = 16
VARIANTS = {"static": None, "1": 1, "2": 2, "4": 4, "8": 8, "16": 16}
_SHAPES = ("paper-125m", "qwen3-30b-8k", "olmoe", "mixtral")
_BLOCKS = 212  # KiB of shared memory that a program holds, and so its multiprocessor


@gluon.jit(do_not_specialize=["until"])
def hold_kernel(released_ptr, until, looks, BLOCKS: gl.constexpr):
    """Occupy a multiprocessor until the number at ``released_ptr`` has reached ``until``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = gl.allocate_shared_memory(gl.int32, [BLOCKS, 256], plain)
    memory.index(BLOCKS - 1).store(gl.full([256], 0, gl.int32, layout))
    released = gl.load(released_ptr, volatile=True)
    while (released < until) & (looks > 0):
        released = gl.load(released_ptr, volatile=True)
        looks -= 1
    # What is stored is used, or the compiler would do without it.
    zeros = memory.index(BLOCKS - 1).load(layout)
    gl.store(released_ptr + 1 + gl.arange(0, 256, layout), zeros)


class Holder:
    """Calls beside a kernel on ``HELD`` multiprocessors."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.released = torch.zeros(257, dtype=torch.int32, device="cuda")
        self.released[:1].add_(0)  # loads the kernel, for which the GPU must not be held
        self.calls = 0

    def beside(self, call: Callable[[], object]) -> None:
        self.calls += 1
        with torch.cuda.stream(self.stream):  # it begins during the flush that precedes a call
            hold_kernel[(HELD,)](self.released, self.calls, 1_000_000, BLOCKS=_BLOCKS)
        call()
        self.released[:1].add_(1)


def _under(plan: Plan, kernel: Kernel) -> None:
    with assume(lambda dtype: plan):
        kernel.launch(kernel.tile)


def _row(kernel: Kernel, holder: Holder) -> list[dict[str, Any]]:
    """The times of one kernel, alone and beside."""
    plan = plan_of(torch.empty(0, device="cuda", dtype=torch.bfloat16))
    calls: dict[str, Callable[[], object]] = {}
    for name, tiles in VARIANTS.items():
        calls[name] = functools.partial(_under, replace(plan, tiles_per_program=tiles), kernel)
        calls[f"{name} beside"] = functools.partial(holder.beside, calls[name])
    times = {name: median(found) for name, found in in_turns(calls, seconds=2.0).items()}
    rows = []
    for beside, units in (("", plan.units), (" beside", plan.units - HELD)):
        found = {name: times[name + beside] for name in VARIANTS}
        best = min(found, key=lambda name: found[name])
        rows.append(
            {
                "beside": bool(beside),
                **{name: f"{ms:.4g}" for name, ms in found.items()},
                "best": best,
                "of_static": round(found[best] / times["static"], 3),
                "floor": round(plan.units / units, 3),
            }
        )
    return rows


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    holder = Holder()
    for name in _SHAPES[2:3] if quick else _SHAPES:
        yield [
            {"benchmark": "share", "shape": name, "what": what, **row}
            for what, kernel in kernels(SHAPES[name]).items()
            if kernel.tile is not None
            for row in _row(kernel, holder)
        ]
        torch.cuda.empty_cache()
