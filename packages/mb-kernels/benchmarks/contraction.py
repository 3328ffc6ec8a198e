"""Weight gradients for 0 and more rows per expert: how much is the product, how much the store.

    python packages/mb-kernels/benchmarks/run.py contraction [--shape dsv3]

`gmm(trans_a=True)` for the up-projection with the same number of rows for each expert, beside a
`bmm` of the same FLOPs. With 0 rows a gradient of zeros is stored; "fill" is torch's `fill_` of as
many bytes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from layer import SHAPES
from mb_kernels import gmm
from timing import in_turns, median

ROWS = (0, 64, 128, 192, 256, 320, 512)


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name in [n for n in ("dsv3", "qwen3-30b", "olmoe") if n in SHAPES][: 1 if quick else None]:
        shape, table = SHAPES[name], []
        experts, columns, hidden = shape.experts, shape.columns, shape.hidden
        for rows in ROWS:
            a = torch.randn(experts * rows, columns, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(experts * rows, hidden, device="cuda", dtype=torch.bfloat16)
            sizes = torch.full((experts,), rows, device="cuda", dtype=torch.int32)
            calls: dict[str, Callable[[], object]] = {
                "gmm_ms": lambda a=a, b=b, sizes=sizes: gmm(a, b, sizes, trans_a=True)
            }
            if rows:
                pairs = a.view(experts, rows, columns).mT, b.view(experts, rows, hidden)
                calls["bmm_ms"] = lambda pairs=pairs: torch.bmm(*pairs)
            else:
                out = torch.empty(experts, columns, hidden, device="cuda", dtype=torch.bfloat16)
                calls["fill_ms"] = lambda out=out: out.fill_(1)
            times = {call: median(found) for call, found in in_turns(calls, seconds=1.0).items()}
            tflops = 2e-9 * experts * rows * columns * hidden / times["gmm_ms"]
            figures = {call: f"{ms:.4g}" for call, ms in times.items()}
            table.append({"shape": name, "rows": rows, **figures, "gmm_tflops": f"{tflops:.0f}"})
        yield table
