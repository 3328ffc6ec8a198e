"""Block-sparse products of an expert layer, in turns with stk's own kernels.

    python packages/mb-kernels/benchmarks/run.py block_sparse [--quick]

Both get the same ``stk.Matrix`` with 32-bit indices, because stk's kernels multiply block indices
in the indices' own width: with 16 bits they overflow from 32,768 rows on. The shapes are those of
MegaBlocks' matrix benchmark (tokens, hidden, ffn, experts; top-1) and of OLMoE's experts.
"""

from collections.abc import Callable, Iterator

import stk
import torch
from mb_kernels import dds, dsd, pad_bins, reference, sdd, topology
from mb_kernels.block_sparse.reference import BLOCK, make_matrix, topology_of
from timing import eight_of_ten, in_turns, median
from torch import Tensor

SHAPES = {
    "megablocks-46m": (65536, 512, 2048, 64),
    "megablocks-125m": (32768, 768, 3072, 64),
    "megablocks-356m": (8192, 1024, 4096, 64),
    "megablocks-wide": (8192, 4096, 16384, 4),
    "olmoe": (262144, 2048, 1024, 64),
}


def make_operands(
    tokens: int, hidden: int, ffn: int, experts: int
) -> tuple[stk.Matrix, Tensor, Tensor]:
    """h [R, E·F] with just the blocks in use, x [R, D] and w [E·F, D]; random routing."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) / 16

    ids = torch.randint(experts, (tokens, 1), device="cuda", generator=generator).int()
    bins = pad_bins(reference.bin_tokens(ids, experts))
    t = topology_of(topology(bins, ffn, dtype=torch.bfloat16))
    rows, used = int(bins.offsets_E1[-1]), int(t.offsets[-1])
    t = t._replace(
        row_indices=t.row_indices[:used].clone(),
        column_indices=t.column_indices[:used].clone(),
        offsets=t.offsets[: rows // BLOCK + 1].clone(),
        column_indices_t=t.column_indices_t[:used].clone(),
        block_offsets_t=t.block_offsets_t[:used].clone(),
    )
    h = make_matrix((rows, experts * ffn), randn(used, BLOCK, BLOCK), t)
    return h, randn(rows, hidden), randn(experts * ffn, hidden)


def products(
    h: stk.Matrix, x: Tensor, w: Tensor
) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Name, ours and stk's: the products of the forward and backward of both expert layers."""
    yield "sdd x @ w1^T", lambda: sdd(x, w.t(), h), lambda: stk.ops.sdd(x, w.t(), h)
    yield "dsd h @ w2", lambda: dsd(h, w), lambda: stk.ops.dsd(h, w)
    yield "dsd h^T @ x", lambda: dsd(h.t(), x), lambda: stk.ops.dsd(h.t(), x)
    yield "dds x^T @ h", lambda: dds(x.t(), h), lambda: stk.ops.dds(x.t(), h)
    yield "dds w^T @ h^T", lambda: dds(w.t(), h.t()), lambda: stk.ops.dds(w.t(), h.t())


def run(*, quick: bool = False) -> Iterator[list[dict[str, object]]]:
    """One row per product, a table per shape; ``quick`` measures the second shape alone."""
    for shape in ["megablocks-125m"] if quick else SHAPES:
        h, x, w = make_operands(*SHAPES[shape])
        flops = 2 * h.data.numel() * x.shape[1]
        rows = []
        for name, ours, theirs in products(h, x, w):
            times = in_turns({"ours": ours, "stk": theirs}, seconds=1.5)
            ms, baseline = median(times["ours"]), median(times["stk"])
            rows.append(
                {
                    "benchmark": "block_sparse",
                    "shape": shape,
                    "what": name,
                    "ms": f"{ms:.4g}",
                    "8_of_10": eight_of_ten(times["ours"]),
                    "tflops": round(flops / ms / 1e9),
                    "stk_ms": f"{baseline:.4g}",
                    "times_faster": round(baseline / ms, 2),
                }
            )
        yield rows
