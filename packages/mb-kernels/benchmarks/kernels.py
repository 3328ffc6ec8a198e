"""Each kernel of the layer alone, at the layer benchmark's shapes and this device's tiles.

    python packages/mb-kernels/benchmarks/run.py kernels

`bmm` is one batched product of the up-projection's FLOPs by cuBLAS, for scale; the sort is what
`topk_ids` took the place of. Bandwidths count each operand once. The kernels of a shape take turns,
see `timing`.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from layer import SHAPES, Shape, make_inputs
from mb_kernels import bin_tokens, reference, topk_ids, topk_softmax
from mb_kernels.expert_mlp.dact import dact
from mb_kernels.expert_mlp.plan import expert_plan
from mb_kernels.expert_mlp.up import up
from mb_kernels.grouped_gemm.kernels import outer, rows_times_weights, schedule
from mb_kernels.permute.kernels import combine, spread, sum_partials
from mb_kernels.runtime.launch import cdiv
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets import Tile
from timing import eight_of_ten, in_turns, median


@dataclass(frozen=True)
class Kernel:
    """launch(tile) runs it, a kernel without tiles ignores the argument; tile: the table's."""

    launch: Callable[[Any], object]
    flops: float = 0.0
    moved: float = 0.0
    tile: Tile | None = None


def kernels(shape: Shape, device: str = "cuda", *, zeros: bool = False) -> dict[str, Kernel]:
    """The kernels of a step by name; ``zeros``: of operands that are all zeros."""
    inputs = {name: t.detach() for name, t in make_inputs(shape, "uniform", device).items()}
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    weights, ids, _ = topk_softmax(inputs["logits"], shape.top_k)
    bins = bin_tokens(ids, shape.experts)
    order, inverse, offsets = bins.order_N, bins.inverse_N, bins.offsets_E1
    n, top_k = order.shape[0], shape.top_k
    rows = x.new_empty((n, shape.hidden)).normal_()
    h = x.new_empty((n, shape.columns)).normal_()
    a = x.new_empty((n, shape.ffn)).normal_()
    if zeros:
        for operand in (x, w1, w2, rows, h, a):
            operand.zero_()
    plan = expert_plan(plan_of(x), shape.activation, n, shape.experts, keep_rows=top_k == 1)
    single = {"fill_dropped": top_k == 1, "scatter_order": order if top_k == 1 else None}
    scale = {"scale": weights if top_k == 1 else None}
    partials = torch.rand(cdiv(shape.ffn, 256), n, device=x.device)
    indices = (order, inverse, offsets)
    up_flops, down_flops = 2.0 * n * w1[0].numel(), 2.0 * n * w2[0].numel()
    of_height = functools.cache(lambda block_m: schedule(offsets, n, block_m))
    batch = rows[: n // shape.experts * shape.experts].view(shape.experts, -1, shape.hidden)

    def run_up(tile: Tile) -> object:
        tiles = of_height(tile.block_m)
        source, source_order = (rows, None) if plan.in_rows else (x, order)
        options = {"order": source_order, "top_k": top_k, "save_h": True, "tile": tile}
        return up(source, w1, None, tiles, plan.activation, transposed=False, **options)

    def run_down(tile: Tile) -> object:
        options = {"transpose_weight": True, "tile": tile, **single, **scale}
        return rows_times_weights(a, w2, of_height(tile.block_m), **options)

    def run_dact(tile: Tile) -> object:
        tiles = of_height(tile.block_m)
        options = {"transposed": False, "tile": tile}
        return dact(rows, w2, order, weights, tiles, h, plan.activation, **options)

    def run_dx(tile: Tile) -> object:
        options = {"transpose_weight": False, "tile": tile, **single}
        return rows_times_weights(h, w1, of_height(tile.block_m), **options)

    return {
        "bmm (cuBLAS)": Kernel(lambda _: torch.bmm(batch, w1.transpose(1, 2)), up_flops),
        "topk_softmax": Kernel(
            lambda _: topk_softmax(inputs["logits"], top_k), moved=2 * inputs["logits"].nbytes
        ),
        "topk_ids": Kernel(
            lambda _: topk_ids(inputs["logits"], top_k), moved=inputs["logits"].nbytes
        ),
        "sort (torch)": Kernel(lambda _: reference.topk_ids(inputs["logits"], top_k)),
        "bin_tokens": Kernel(lambda _: bin_tokens(ids, shape.experts), moved=3 * order.nbytes),
        "schedule": Kernel(lambda _: schedule(offsets, n, 128)),
        "up": Kernel(run_up, up_flops, tile=plan.up),
        "down": Kernel(run_down, down_flops, tile=plan.down),
        "combine": Kernel(
            lambda _: combine(rows, *indices, weights, top_k), moved=rows.nbytes + x.nbytes
        ),
        "spread": Kernel(lambda _: spread(x, inverse, top_k, n), moved=rows.nbytes + x.nbytes),
        "dact": Kernel(run_dact, down_flops, tile=plan.dact),
        "sum_partials": Kernel(
            lambda _: sum_partials(partials, order, offsets, weights), moved=partials.nbytes
        ),
        "dw2": Kernel(
            lambda tile: outer(rows, a, offsets, tile), down_flops, tile=plan_of(x).tile("outer")
        ),
        "dx": Kernel(run_dx, up_flops, tile=plan.dx),
        "dw1": Kernel(
            lambda tile: outer(h, rows, offsets, tile), up_flops, tile=plan_of(x).tile("outer")
        ),
    }


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name, shape in SHAPES.items():
        if quick and name.endswith("-8k"):
            continue
        found = kernels(shape)
        times = in_turns({what: functools.partial(k.launch, k.tile) for what, k in found.items()})
        table = []
        for what, kernel in found.items():
            ms = median(times[what])
            table.append(
                {
                    "benchmark": "kernels",
                    "shape": name,
                    "what": what,
                    "ms": f"{ms:.4g}",
                    "8_of_10": eight_of_ten(times[what]),
                    "tflops": round(kernel.flops / ms / 1e9) if kernel.flops else "",
                    "GB/s": round(kernel.moved / ms / 1e6) if kernel.moved else "",
                }
            )
        yield table
        del found
        torch.cuda.empty_cache()
