"""Kernels number rows in 32 bits: more rows are refused where they are launched."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from mb_kernels.block_sparse import kernels as block_sparse
from mb_kernels.exchange import Layout
from mb_kernels.exchange import routing_kernels as exchange
from mb_kernels.expert_mlp import steps
from mb_kernels.grouped_gemm import kernels as grouped_gemm
from mb_kernels.relative_attention import kernels as attention
from mb_kernels.router_losses import kernels as router_losses
from mb_kernels.routing import kernels as routing
from mb_kernels.runtime.plan import assume, plan_for
from mb_kernels.runtime.recording import record
from mb_kernels.targets import TARGETS

MANY = 2**30
empty = partial(torch.empty, device="meta")
half = partial(empty, dtype=torch.float16)
int32 = partial(empty, dtype=torch.int32)


def expert_mlp(rows):
    indices = (int32(rows), int32(rows), int32(2))
    weights = (half(1, 32, 16), half(1, 16, 16))
    given = (half(rows, 16), *weights, *indices, empty(rows, 1), None, None, [False, False])
    return steps.expert_mlp(*given, "swiglu", 16, False, False)


def losses(tokens):
    one = int32(())
    given = (empty(tokens, 1), empty(tokens, 1), int32(1), int32(1), one, None, None, None)
    return router_losses.router_losses(*given, 0.1, 0.1, False)


def attend(tokens, distances):
    x = half(tokens, 2, 16)
    return attention.relative_attention(x, x, x, half(2, distances), int32(2), False, 1.0)


CALLS = {
    "topk_ids": lambda n: routing.topk_ids(half(n, 2), 1),
    "topk_softmax": lambda n: routing.topk_softmax(half(n, 2), 1, False),
    "bin_tokens": lambda n: routing.bin_tokens(int32(n // 2, 2), 4, None),
    "expert_mlp": expert_mlp,
    "grouped_gemm": lambda n: grouped_gemm.grouped_gemm(
        half(n, 16), half(1, 16, 16), int32(2), True
    ),
    "grouped_outer": lambda n: grouped_gemm.grouped_outer(half(n, 16), half(n, 16), int32(2)),
    "router_losses": losses,
    "pack_routing": lambda n: exchange.pack_routing(empty(n, 1), int32(n, 1), 4, 2),
    "Layout": lambda n: Layout(2, n // 2, 8, 2, torch.bfloat16),
    "attention": lambda n: attend(n, 15),
    "attention, bias": lambda n: attend(64, n // 2 - 1 + n // MANY),
}


@pytest.mark.parametrize("name", CALLS)
def test_more_rows_than_kernels_count_are_refused(name):
    with assume(lambda dtype: plan_for(TARGETS["sm90"], dtype, 132, False)), record():
        CALLS[name](MANY - 2)
        with pytest.raises(
            ValueError, match=r"expected fewer than 2\*\*30 on a GPU; got 1073741824"
        ):
            CALLS[name](MANY)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_offsets_in_a_tile_of_a_dense_matrix_fit_32_bits(target):
    """Through pointers; a tensor descriptor has 64-bit strides."""
    blocks = [int32(size) for size in (1, 1, 2, 2, 1, 1)]

    def sdd(apart):
        a = half(1, 128, apart)[:, :, :128]  # rows ``apart`` elements apart
        return block_sparse.sdd(a, half(1, 128, 128), *blocks)

    def dsd(apart):
        b = half(1, 128, apart)[:, :, :64]
        return block_sparse.dsd(half(1, 128, 128), b, *blocks, False, 1, False)

    with assume(lambda dtype: plan_for(TARGETS[target], dtype, 132, False)), record():
        for product in (sdd, dsd):
            product(2**24 - 8)
            if target == "sm90":
                product(2**24)
                continue
            with pytest.raises(ValueError, match=r"fewer than 2\*\*24 elements apart.*16777216"):
                product(2**24)
