"""The host's time for a layer: the layer benchmark on tensors so small that the GPU idles.

    python packages/mb-kernels/benchmarks/run.py host

As long as this time is below the GPU's, an eager step is as fast as its CUDA graph. "calling
thread" runs the backward in the forward's thread (`autograd.set_multithreading_enabled(False)`).
Otherwise each step wakes autograd's own thread on another core and then the caller's again, both
with cold caches. `a + b` is one launch by torch, to show how fast the machine's cores are.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from layer import Shape, bmm, make_inputs, ours
from mb_kernels import bin_tokens, expert_mlp, topk_softmax
from mb_kernels.runtime.descriptors import matrices, ragged

SHAPES = {
    "tiny-top1-gelu": Shape(512, 64, 128, 64, 1, "gelu"),
    "tiny-top8-swiglu": Shape(512, 64, 128, 64, 8),
}


def host_us(call: Callable[[], object], repeats: int = 200) -> float:
    """Microseconds until ``call`` returns, the best of five means."""
    for _ in range(10):
        call()
    means = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        means.append((time.perf_counter() - start) / repeats * 1e6)
    torch.cuda.synchronize()
    return min(means)


def steps(shape: Shape) -> dict[str, float]:
    inputs = make_inputs(shape, "uniform")
    arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    dy = torch.randn_like(arguments[0])
    per_expert = shape.tokens * shape.top_k // shape.experts
    rows = dy.new_empty((shape.experts, per_expert, shape.hidden)).requires_grad_()
    weights = dy.new_ones((shape.tokens, shape.top_k)).requires_grad_()
    baseline = [rows, weights, *arguments[2:]]

    def both(layer: Callable[..., Any], leaves: list[torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(*leaves), leaves, dy)

    layer = ours(shape)
    x, logits, w1, w2 = (a.detach() for a in arguments)
    routing_weights, ids, _ = topk_softmax(logits, shape.top_k)
    bins = bin_tokens(ids, shape.experts)
    results = {
        "a + b": host_us(lambda: x + x, 2000),
        "descriptors: matrices": host_us(lambda: matrices(w1, (1, 64, 64)), 2000),
        "descriptors: ragged": host_us(lambda: ragged(x, (64, 64)), 2000),
        "topk_softmax": host_us(lambda: topk_softmax(logits, shape.top_k)),
        "bin_tokens": host_us(lambda: bin_tokens(ids, shape.experts)),
        "expert_mlp": host_us(
            lambda: expert_mlp(x, w1, w2, bins, routing_weights, activation=shape.activation)
        ),
        "forward": host_us(lambda: layer(*arguments)),
        "both": host_us(both(layer, arguments)),
        "bmm, both": host_us(both(bmm(shape), baseline)),
    }
    with torch.autograd.set_multithreading_enabled(False):
        results["both, calling thread"] = host_us(both(layer, arguments))
        results["bmm, both, calling thread"] = host_us(both(bmm(shape), baseline))
    return results


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name, shape in SHAPES.items():
        yield [
            {"benchmark": "host", "shape": name, "what": what, "us": round(us, 1)}
            for what, us in steps(shape).items()
        ]
