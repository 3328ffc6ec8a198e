"""The forward of a layer on a few tokens, as in decoding: its time is that of reading weights.

    python packages/mb-kernels/benchmarks/run.py decode

From routing to combine, in a CUDA graph and eagerly. "floor" is the time to read the weights of the
chosen experts at 4.3 TB/s. The aim is 1.2 times that plus 30 us.

Letters: T tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from layer import SHAPES, make_inputs, ours
from mb_kernels import topk_softmax
from timing import eight_of_ten, in_turns, median

TOKENS = (1, 8, 64)
_BYTES_PER_MS = 4.3e9


def _graphed(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name in [n for n in ("qwen3-30b", "olmoe", "mixtral") if n in SHAPES][
        : 1 if quick else None
    ]:
        table = []
        for tokens in TOKENS:
            shape = replace(SHAPES[name], tokens=tokens)
            inputs = {n: t.detach() for n, t in make_inputs(shape, "uniform").items()}
            layer = ours(shape)

            def eager(layer=layer, inputs=inputs) -> object:
                return layer(inputs["x"], inputs["logits"], inputs["w1"], inputs["w2"])

            chosen = topk_softmax(inputs["logits"], shape.top_k)[1].unique().numel()
            weights = inputs["w1"][0].nbytes + inputs["w2"][0].nbytes
            floor = chosen * weights / _BYTES_PER_MS
            times = in_turns({"graph": _graphed(eager), "eager": eager})
            row = {"benchmark": "decode", "shape": name, "tokens": tokens, "experts": chosen}
            row["floor_us"] = f"{1e3 * floor:.1f}"
            for how, found in times.items():
                row[f"{how}_us"] = f"{1e3 * median(found):.1f}"
                row[f"{how}_8_of_10"] = eight_of_ten(found)
            row["of_aim"] = round(median(times["graph"]) / (1.2 * floor + 0.03), 2)
            table.append(row)
        yield table
