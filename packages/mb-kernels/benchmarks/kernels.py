"""Each kernel of the layer alone, at the layer benchmark's shapes and this device's tiles.

    python packages/mb-kernels/benchmarks/run.py kernels

`bmm` is one batched product of the up-projection's FLOPs by cuBLAS, for scale. Bandwidths count
each operand once.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from layer import SHAPES, Shape, make_inputs
from mb_kernels import bin_tokens, topk_softmax
from mb_kernels._dact import dact, dact_tile
from mb_kernels._launch import tile_of
from mb_kernels._outer import outer
from mb_kernels._permute import combine, spread, sum_partials
from mb_kernels._rows import rows_times_weights
from mb_kernels._schedule import schedule
from mb_kernels._up import up, up_tile
from triton.testing import do_bench


def kernels(shape: Shape) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Name to (launch, FLOPs, bytes)."""
    inputs = {name: t.detach() for name, t in make_inputs(shape, "uniform").items()}
    x, w1, w2 = inputs["x"], inputs["w1"], inputs["w2"]
    weights, ids, _ = topk_softmax(inputs["logits"], shape.top_k)
    bins = bin_tokens(ids, shape.experts)
    order, inverse, offsets = bins.order_N, bins.inverse_N, bins.offsets_E1
    n, activation, top_k = order.shape[0], shape.activation, shape.top_k
    rows = x.new_empty((n, shape.hidden)).normal_()
    h = x.new_empty((n, shape.columns)).normal_()
    a = x.new_empty((n, shape.ffn)).normal_()
    tiles = schedule(offsets, n, 128)
    single = {"fill_dropped": top_k == 1, "scatter_order": order if top_k == 1 else None}
    scale = {"scale": weights if top_k == 1 else None}
    partials = torch.rand(shape.ffn // 256, n, device=x.device)
    indices = (order, inverse, offsets)
    up_flops, down_flops = 2.0 * n * w1[0].numel(), 2.0 * n * w2[0].numel()

    def down() -> object:
        tile = tile_of("down", x)
        return rows_times_weights(a, w2, tiles, transpose_weight=True, tile=tile, **single, **scale)

    def dx() -> object:
        tile = tile_of("dx", x)
        return rows_times_weights(h, w1, tiles, transpose_weight=False, tile=tile, **single)

    batch = rows[: n // shape.experts * shape.experts].view(shape.experts, -1, shape.hidden)
    tile_up, tile_dact = up_tile(x, w1, activation), dact_tile(x, activation)
    return {
        "bmm (cuBLAS)": (lambda: torch.bmm(batch, w1.transpose(1, 2)), up_flops, 0),
        "topk_softmax": (
            lambda: topk_softmax(inputs["logits"], top_k),
            0,
            2 * inputs["logits"].nbytes,
        ),
        "bin_tokens": (lambda: bin_tokens(ids, shape.experts), 0, 3 * order.nbytes),
        "schedule": (lambda: schedule(offsets, n, 128), 0, 0),
        "up": (
            lambda: up(
                x, w1, order, inverse, tiles, activation, top_k=top_k, save_h=True, tile=tile_up
            ),
            up_flops,
            0,
        ),
        "down": (down, down_flops, 0),
        "combine": (lambda: combine(rows, *indices, weights, top_k), 0, rows.nbytes + x.nbytes),
        "spread": (lambda: spread(x, inverse, top_k), 0, rows.nbytes + x.nbytes),
        "dact": (
            lambda: dact(rows, w2, order, weights, tiles, h, activation, tile=tile_dact),
            down_flops,
            0,
        ),
        "sum_partials": (
            lambda: sum_partials(partials, order, offsets, weights),
            0,
            partials.nbytes,
        ),
        "dw2": (lambda: outer(rows, a, offsets), down_flops, 0),
        "dx": (dx, up_flops, 0),
        "dw1": (lambda: outer(h, rows, offsets), up_flops, 0),
    }


def run(*, quick: bool = False) -> list[dict[str, Any]]:
    table = []
    for name, shape in SHAPES.items():
        if quick and name.endswith("-8k"):
            continue
        for kernel, (launch, flops, moved) in kernels(shape).items():
            ms = do_bench(launch, warmup=25, rep=100, return_mode="median")
            table.append(
                {
                    "benchmark": "kernels",
                    "shape": name,
                    "what": kernel,
                    "ms": round(ms, 4),
                    "tflops": round(flops / ms / 1e9) if flops else "",
                    "GB/s": round(moved / ms / 1e6) if moved else "",
                }
            )
        torch.cuda.empty_cache()
    return table
