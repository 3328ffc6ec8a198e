"""One MoE layer, routing to combine, beside `bmm` of the same FLOPs and torch's `grouped_mm`.

    python packages/mb-kernels/benchmarks/run.py layer [--quick]

Ours and `grouped_mm` start from router logits (the router's own linear is the same for everyone).
`bmm` is a layer whose routing is free and perfectly even: rows already gathered, two batched
products of the same FLOPs around an eager activation, a weighted sum over each token's rows. "with
copies" also gathers, as a layer that takes tokens must; "products only" leaves out the sum.
"calling thread" runs the backward in the forward's thread, as mb-train does, see `host`. "CUDA
graph" is one graph of forward and backward; "graphed callable" is
`torch.cuda.make_graphed_callables`, a graph for each. All take turns, see `timing`. Times are
medians; eight of ten times are in the range "8_of_10". "fp8": four of the six products are of
8-bit floats.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from mb_kernels import bin_tokens, expert_mlp, is_glu, topk_softmax
from mb_kernels.activation import activate
from mb_kernels.testing import make_expert_ids
from timing import eight_of_ten, in_turns, median
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def columns(self) -> int:
        return self.ffn * (2 if is_glu(self.activation) else 1)

    @property
    def flops(self) -> int:
        """Of forward and backward, matrix products only."""
        return 6 * self.tokens * self.top_k * self.hidden * (self.columns + self.ffn)


SHAPES = {
    "olmoe": Shape(32768, 2048, 1024, 64, 8),
    "qwen3-30b": Shape(32768, 2048, 768, 128, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "paper-125m": Shape(16384, 768, 3072, 64, 1, "gelu"),
    "olmoe-8k": Shape(8192, 2048, 1024, 64, 8),
    "qwen3-30b-8k": Shape(8192, 2048, 768, 128, 8),
    "dsv3": Shape(8192, 7168, 2048, 256, 8),
    "dsv3-rank": Shape(8192, 7168, 2048, 32, 8),  # of 8 ranks, with an even share of all rows
    "fine": Shape(24576, 1536, 256, 128, 8),
    "gpt-oss": Shape(8192, 2880, 2880, 32, 4, "swigluoai"),  # without its biases
}


def make_inputs(shape: Shape, routing: str, device: str = "cuda") -> dict[str, Tensor]:
    """Normal activations and weights, and logits that route as ``routing`` says."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
        return (values * scale).requires_grad_()

    ids = make_expert_ids(
        routing,
        shape.tokens,
        shape.experts,
        shape.top_k,
        generator=torch.Generator().manual_seed(0),
        device=device,
    )
    logits = torch.randn(shape.tokens, shape.experts, device=device, generator=generator)
    logits.scatter_add_(1, ids.long(), torch.full_like(logits, 20.0)[:, : shape.top_k])
    return {
        "x": normal(shape.tokens, shape.hidden),
        "logits": logits.requires_grad_(),
        "w1": normal(shape.experts, shape.columns, shape.hidden, scale=shape.hidden**-0.5),
        "w2": normal(shape.experts, shape.hidden, shape.ffn, scale=shape.ffn**-0.5),
    }


def ours(shape: Shape, **options: bool) -> Callable[..., Tensor]:
    def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids, _ = topk_softmax(logits, shape.top_k)
        bins = bin_tokens(ids, shape.experts)
        return expert_mlp(x, w1, w2, bins, weights, activation=shape.activation, **options)

    return layer


def grouped_mm(shape: Shape) -> Callable[..., Tensor]:
    """The layer in torch alone: sort, gather, two grouped products, combine."""

    def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights, ids = torch.softmax(logits, dim=-1).topk(shape.top_k)
        flat = ids.flatten()
        order = flat.argsort()
        counts = torch.zeros(shape.experts, device=x.device, dtype=torch.int32)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        h = F.grouped_mm(x[order // shape.top_k], w1.transpose(1, 2), offs=ends)
        rows = F.grouped_mm(activate(h, shape.activation), w2.transpose(1, 2), offs=ends)
        rows = rows * weights.flatten()[order, None]
        y = torch.zeros_like(rows)
        y = y.index_copy(0, order, rows.to(y.dtype))
        return y.view(-1, shape.top_k, shape.hidden).sum(1)

    return layer


def bmm(shape: Shape) -> Callable[..., Tensor]:
    def layer(rows: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = torch.bmm(rows, w1.transpose(1, 2))
        rows = torch.bmm(activate(h, shape.activation), w2.transpose(1, 2))
        return (rows.view(-1, shape.top_k, shape.hidden) * weights[..., None]).sum(1)

    return layer


def bmm_with_copies(shape: Shape) -> Callable[..., Tensor]:
    """Token t's copy k goes to expert (t·K + k) mod E: even, and nothing to sort or count."""

    def layer(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        weights = torch.softmax(logits, dim=-1)[:, : shape.top_k, None]
        copies = x[:, None].expand(-1, shape.top_k, -1)
        rows = copies.reshape(-1, shape.experts, shape.hidden).transpose(0, 1)
        h = torch.bmm(rows, w1.transpose(1, 2))
        rows = torch.bmm(activate(h, shape.activation), w2.transpose(1, 2))
        rows = rows.transpose(0, 1).reshape(-1, shape.top_k, shape.hidden)
        return (rows * weights.to(rows.dtype)).sum(1)

    return layer


def products(shape: Shape) -> Callable[..., Tensor]:
    def layer(rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = torch.bmm(rows, w1.transpose(1, 2))
        return torch.bmm(activate(h, shape.activation), w2.transpose(1, 2))

    return layer


@dataclass(frozen=True)
class Contender:
    """both: forward and backward. A CUDA graph of both has no forward alone; graphs hold what they
    hold.

    held: MiB kept from forward to backward, beyond inputs and output.
    """

    both: Callable[[], object]
    forward: Callable[[], object] | None = None
    held: float | None = None


def eager(
    layer: Callable[..., Tensor], arguments: Sequence[Tensor], *, calling_thread: bool = False
) -> Contender:
    leaves = [a.detach().requires_grad_() for a in arguments]
    y = layer(*leaves)
    dy = torch.randn_like(y)
    torch.autograd.grad(y, leaves, dy)
    del y
    before = torch.cuda.memory_allocated()
    y = layer(*leaves)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    del y

    def both() -> object:
        with torch.autograd.set_multithreading_enabled(not calling_thread):
            return torch.autograd.grad(layer(*leaves), leaves, dy)

    return Contender(both, lambda: layer(*leaves), held / 2**20)


def graphed(layer: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Contender:
    leaves = [a.detach().requires_grad_() for a in arguments]
    dy = torch.randn_like(layer(*leaves))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(layer(*leaves), leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = torch.autograd.grad(layer(*leaves), leaves, dy)

    def replay() -> object:
        graph.replay()
        return kept, dy  # the graph writes and reads these: they must outlive it

    return Contender(replay)


def graphed_callable(layer: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Contender:
    leaves = [a.detach().requires_grad_() for a in arguments]
    replayed = torch.cuda.make_graphed_callables(layer, tuple(leaves))
    dy = torch.randn_like(leaves[0])
    return Contender(
        lambda: torch.autograd.grad(replayed(*leaves), leaves, dy), lambda: replayed(*leaves)
    )


def contenders(shape: Shape, *, quick: bool) -> dict[str, Contender]:
    inputs = make_inputs(shape, "uniform")
    arguments = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    per_expert = shape.tokens * shape.top_k // shape.experts
    rows = inputs["x"].new_empty((shape.experts, per_expert, shape.hidden)).normal_()
    weights = inputs["x"].new_full((shape.tokens, shape.top_k), 1 / shape.top_k)
    gathered = [rows, weights, *arguments[2:]]
    found = {
        "bmm": eager(bmm(shape), gathered),
        "mb uniform": eager(ours(shape), arguments),
        "mb uniform, fp8": eager(ours(shape, fp8=True), arguments),
    }
    if inputs["w1"].nbytes > 2**33:  # gradients that graphs keep would not fit
        return found
    found |= {
        "bmm, calling thread": eager(bmm(shape), gathered, calling_thread=True),
        "bmm, CUDA graph": graphed(bmm(shape), gathered),
    }
    for routing in ("skewed", "one_expert"):
        routed = [arguments[0], make_inputs(shape, routing)["logits"], *arguments[2:]]
        found[f"mb {routing}"] = eager(ours(shape), routed)
    found |= {
        "mb uniform, calling thread": eager(ours(shape), arguments, calling_thread=True),
        "mb uniform, CUDA graph": graphed(ours(shape), arguments),
        "mb uniform, graphed callable": graphed_callable(ours(shape), arguments),
        "mb uniform, recompute": eager(ours(shape, recompute=True), arguments),
    }
    if not quick:
        found |= {
            "bmm, with copies": eager(bmm_with_copies(shape), arguments),
            "bmm, products only": eager(products(shape), [rows, *arguments[2:]]),
            "grouped_mm eager": eager(grouped_mm(shape), arguments),
            "grouped_mm compiled": eager(torch.compile(grouped_mm(shape)), arguments),
        }
    return found


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name, shape in SHAPES.items():
        found = contenders(shape, quick=quick)
        both = in_turns({what: c.both for what, c in found.items()}, seconds=5)
        forward = in_turns({what: c.forward for what, c in found.items() if c.forward}, seconds=2)
        base = median(both["bmm"])
        yield [
            {
                "benchmark": "layer",
                "shape": name,
                "what": what,
                "forward_ms": f"{median(forward[what]):.4g}" if what in forward else "",
                "both_ms": f"{median(both[what]):.4g}",
                "8_of_10": eight_of_ten(both[what]),
                "of_bmm": round(median(both[what]) / base, 3),
                "tflops": round(shape.flops / median(both[what]) / 1e9),
                "held_MiB": "" if contender.held is None else round(contender.held, 1),
            }
            for what, contender in found.items()
        ]
        del found
        torch.cuda.empty_cache()
