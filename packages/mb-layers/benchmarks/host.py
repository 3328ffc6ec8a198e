"""Host time of a layer's call: Python, autograd and dispatch alone, on a CPU.

    python packages/mb-layers/benchmarks/host.py

A GPU finishes a small layer sooner than the host can launch it, so the host's work per call decides
the layer's speed. Here the kernels' ops allocate their results and compute nothing, and tensors are
tiny: what is left is the host's work without the launches. It is measured as CPU time of this
process, the least of several rounds, in microseconds; a busy machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from mb_layers import MoE, MoEConfig, dMoE
from torch._library.simple_registry import singleton as registry
from torch.library import Library

SIZES = {"hidden_size": 16, "ffn_hidden_size": 16, "num_experts": 8}
OPTIONS: dict[str, dict] = {
    "top-1, gelu": {"activation": "gelu"},
    "top-2, swiglu": {"top_k": 2},
    "top-2, mask": {"top_k": 2},
    "capacity": {"top_k": 2, "capacity_factor": 1.25},
    "shared expert": {"top_k": 2, "shared_expert_hidden_size": 16},
    "sigmoid, bias": {
        "top_k": 2,
        "score_function": "sigmoid",
        "renormalize": True,
        "balancing_bias": True,
    },
}


@contextmanager
def computing_nothing() -> Generator[None]:
    """Within: ops of mb_kernels on CPU tensors do what they do on fake tensors."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    library = Library("mb", "IMPL")
    for name in sorted(name for name in names if name.startswith("mb::")):
        fake = registry.find(name).fake_impl.kernel
        if fake is not None:
            # Plain torch reads the scores of the experts that this one chose.
            compute = _zeros_of(fake.func) if name == "mb::topk_ids" else fake.func
            library.impl(name.removeprefix("mb::"), compute, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _zeros_of(fake: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: fake(*arguments).zero_()


def microseconds(step: Callable[[], object], calls: int, rounds: int) -> float:
    """Least mean CPU time of a call."""
    step()
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            step()
        best = min(best, (time.process_time() - start) / calls)
    return best * 1e6


def measure(name: str, calls: int, rounds: int) -> dict:
    """Forward without gradients, and forward with backward."""
    config = MoEConfig(**(SIZES | OPTIONS[name]))
    layer = (dMoE if config.capacity_factor is None else MoE)(config)
    x = torch.randn(8, config.hidden_size, requires_grad=True)
    arguments = {"mask": torch.arange(8) < 6} if "mask" in name else {}
    grads = (torch.ones(8, config.hidden_size), torch.ones(()))

    def forward() -> None:
        with torch.no_grad():
            layer(x, **arguments)

    def both() -> None:
        y, aux_loss, _ = layer(x, **arguments)
        torch.autograd.backward((y, aux_loss), grads)

    return {
        "option": name,
        "forward": round(microseconds(forward, calls, rounds)),
        "forward and backward": round(microseconds(both, calls, rounds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two calls of each, for the tests")
    smoke = parser.parse_args().smoke
    calls, rounds = (2, 1) if smoke else (200, 15)
    with computing_nothing():
        rows = [measure(name, calls, rounds) for name in OPTIONS]
    print(f"{'us per call':16} {'forward':>8} {'and backward':>13}")
    for row in rows:
        print(f"{row['option']:16} {row['forward']:8} {row['forward and backward']:13}")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
