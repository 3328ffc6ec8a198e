"""A layer beside those of other libraries that are installed, in turns.

    python packages/mb-kernels/benchmarks/run.py peers --shape olmoe

Each starts from router logits, see `layer`, and takes its own time to choose tiles before it is
timed: Liger about three minutes a shape. "off" is the largest difference from ours, of y or of any
gradient, as a share of the norm there. A library that cannot be imported is left out.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from layer import SHAPES, Contender, Shape, bmm, eager, grouped_mm, make_inputs, ours
from mb_kernels import topk_softmax
from timing import eight_of_ten, in_turns, median
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, logits, w1 and w2


def liger(shape: Shape) -> Layer:
    experts = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids, _ = topk_softmax(logits, shape.top_k)
        return experts.apply(x, w1, w2, ids, weights.to(x.dtype))

    return layer


def scattermoe(shape: Shape) -> Layer:
    experts = importlib.import_module("scattermoe.parallel_experts")

    def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids, _ = topk_softmax(logits, shape.top_k)
        order = experts.flatten_sort_count(ids, num_experts=shape.experts)
        h = experts.parallel_linear(x, w1.mT, shape.top_k, *order, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        activations, weights = F.silu(gate) * up, weights.to(x.dtype)
        return experts.parallel_linear(
            activations, w2.mT, 1, *order, grouped_in=True, gates=weights
        )

    return layer


PEERS = {"Liger": liger, "ScatterMoE": scattermoe}


def results(layer: Layer, arguments: list[Tensor]) -> list[Tensor]:
    """y, and the gradients of the arguments."""
    leaves = [a.detach().requires_grad_() for a in arguments]
    y = layer(*leaves)
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(((f.float() - w.float()).norm() / w.float().norm()).item() for f, w in pairs)


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name, shape in SHAPES.items():
        if shape.activation != "swiglu":
            continue
        inputs = make_inputs(shape, "uniform")
        arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
        layers = {"mb": ours(shape)}
        for who, peer in PEERS.items():
            try:
                layers[who] = peer(shape)
            except ImportError as refusal:
                print(f"{who}: {refusal}")
        if not quick:
            layers["grouped_mm compiled"] = torch.compile(grouped_mm(shape))
        wanted = results(layers["mb"], arguments)
        off = {who: error(results(layer, arguments), wanted) for who, layer in layers.items()}
        del wanted
        rows = (
            inputs["x"]
            .new_empty((shape.experts, shape.tokens * shape.top_k // shape.experts, shape.hidden))
            .normal_()
        )
        weights = inputs["x"].new_full((shape.tokens, shape.top_k), 1 / shape.top_k)
        found: dict[str, Contender] = {who: eager(one, arguments) for who, one in layers.items()}
        found["bmm"] = eager(bmm(shape), [rows, weights, *arguments[2:]])
        both = in_turns({who: one.both for who, one in found.items()}, seconds=4)
        yield [
            {"benchmark": "peers", "shape": name, "what": who,
             "both_ms": f"{median(both[who]):.4g}", "8_of_10": eight_of_ten(both[who]),
             "tflops": round(shape.flops / median(both[who]) / 1e9),
             "held_MiB": round(one.held or 0, 1),
             "off": f"{off[who]:.1g}" if who in off else ""}
            for who, one in found.items()
        ]  # fmt: skip
        del found, layers, arguments, inputs, rows
        torch.cuda.empty_cache()
