"""`mb_layers.compat.ops` against loops over slots: what MegaBlocks' ops do, one by one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, RouterOutput, dMoE
from mb_layers.compat import ops
from torch import Tensor

SHAPES = [
    (7, 2, 4),
    (1, 1, 1),
    (5, 3, 3),
    (9, 1, 6),
    (0, 2, 3),
    (300, 2, 5),
]  # tokens, top k, experts
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
D, BLOCK = 6, 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def sorted_slots(tokens: int, top_k: int, experts: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Indices, bin ids, counts, bins and padded bins, as MegaBlocks' layers make them."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, max(experts - 1, 1), (tokens * top_k,), generator=generator).int()
    ids = ids.to(device)
    bin_ids, indices = ops.sort(ids, max(math.ceil(math.log2(experts)), 1))
    counts = ops.histogram(ids, experts)  # the last expert has none
    padded = ops.inclusive_cumsum(ops.round_up(counts, BLOCK), 0)
    return indices, bin_ids, counts, ops.inclusive_cumsum(counts, 0), padded


def copies(indices: Tensor, places: list[int | None], rows: int, top_k: int) -> Tensor:
    """The matrix [rows, tokens * top_k] that copies slots to rows."""
    moves = torch.zeros(rows, indices.numel(), device=indices.device)
    for slot, place in zip(indices.tolist(), places, strict=True):
        if place is not None:
            moves[place, slot] = 1
    return moves


def check(moves: Tensor, top_k: int, gather, scatter) -> None:
    """Both directions, and the gradients of rows and weights, against products with the matrix."""
    slots, device = moves.shape[1], moves.device
    generator = torch.Generator(device).manual_seed(1)
    random = partial(torch.randn, generator=generator, device=device)
    x = random(slots // top_k, D, requires_grad=True)
    rows = gather(x)
    expected = moves @ x.repeat_interleave(top_k, 0)
    torch.testing.assert_close(rows.reshape(expected.shape), expected)
    seed = random(expected.shape)
    (got,) = torch.autograd.grad(rows, x, seed.view(rows.shape))
    (want,) = torch.autograd.grad(expected, x, seed)
    torch.testing.assert_close(got, want)

    weights, values = random(slots, requires_grad=True), random(rows.shape, requires_grad=True)
    back = random(x.shape)
    for weighing in (weights, None):
        y = scatter(values, weighing)
        scale = torch.ones(slots, device=device) if weighing is None else weighing
        by_slot = (moves.T @ values.reshape(-1, D)) * scale[:, None]
        expected = by_slot.view(-1, top_k, D).sum(1)
        torch.testing.assert_close(y, expected)
        asked = [values] if weighing is None else [values, weights]
        got, want = (torch.autograd.grad(out, asked, back) for out in (y, expected))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_rows_without_padding(tokens: int, top_k: int, experts: int, device: str) -> None:
    indices, bin_ids, _, bins, _ = sorted_slots(tokens, top_k, experts, device)
    moves = copies(indices, list(range(tokens * top_k)), tokens * top_k, top_k)
    check(
        moves,
        top_k,
        lambda x: ops.gather(x, indices, bin_ids, bins, top_k),
        lambda x, weights: ops.scatter(x, indices, bin_ids, weights, bins, top_k),
    )


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_rows_with_padding(tokens: int, top_k: int, experts: int, device: str) -> None:
    indices, bin_ids, counts, bins, padded = sorted_slots(tokens, top_k, experts, device)
    places: list[int | None] = []
    begins = padded - ops.round_up(counts, BLOCK)
    for count, begin in zip(counts.tolist(), begins.tolist(), strict=True):
        places += range(begin, begin + count)
    moves = copies(indices, places, int(padded[-1]), top_k)
    check(
        moves,
        top_k,
        lambda x: ops.padded_gather(x, indices, bin_ids, bins, padded, top_k),
        lambda x, weights: ops.padded_scatter(
            x, indices, bin_ids, weights, bins, padded, top_k, -1
        ),
    )


@pytest.mark.parametrize("capacity", [0, 1, 3, 1000])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_rows_of_a_capacity(
    tokens: int, top_k: int, experts: int, capacity: int, device: str
) -> None:
    indices, _, counts, bins, _ = sorted_slots(tokens, top_k, experts, device)
    places: list[int | None] = []
    for expert, count in enumerate(counts.tolist()):
        places += [expert * capacity + i if i < capacity else None for i in range(count)]
    moves = copies(indices, places, experts * capacity, top_k)
    for given in (capacity, torch.tensor(capacity)):
        check(
            moves,
            top_k,
            lambda x, given=given: ops.binned_gather(x, indices, bins, given, top_k),
            lambda x, weights: ops.binned_scatter(x, indices, weights, bins, top_k),
        )
    x = torch.ones(tokens, D, device=device)
    assert ops.binned_gather(x, indices, bins, capacity, top_k).shape == (experts, capacity, D)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.tensor([2, 0, 3, 2, 0, 2], dtype=dtype)
    values, places = ops.sort(x, 2)
    assert values.tolist() == [0, 0, 2, 2, 2, 3]
    assert places.tolist() == [1, 4, 0, 3, 5, 2]
    assert values.dtype is places.dtype is dtype
    assert ops.histogram(x, 5).tolist() == [2, 0, 3, 1, 0]
    assert ops.histogram(x, 2).tolist() == [2, 0]  # others are in no bin
    two = ops.histogram(torch.stack([x, x - 1]), 3)
    assert two.tolist() == [[2, 0, 3], [0, 3, 1]]
    assert two.dtype is torch.int32
    assert ops.histogram(x[:0], 2).tolist() == [0, 0]
    assert ops.inclusive_cumsum(x, 0).tolist() == [2, 2, 5, 7, 7, 9]
    assert ops.exclusive_cumsum(x, 0).tolist() == [0, 2, 2, 5, 7, 7]
    assert ops.inclusive_cumsum(x.view(2, 3), 1).tolist() == [[2, 2, 5], [2, 2, 4]]
    assert ops.inclusive_cumsum(x, 0).dtype is ops.exclusive_cumsum(x, 0).dtype is dtype
    assert ops.round_up(x, 4).tolist() == [4, 0, 4, 4, 0, 4]
    with pytest.raises(ValueError, match="expected x to be int16, int32 or int64"):
        ops.sort(x.float())


def test_values_over_bins_and_tiles() -> None:
    x = torch.tensor([[1.0, 2, 3], [4, 5, 6]], requires_grad=True)
    bins = torch.tensor([2, 2, 5], dtype=torch.int32)
    y = ops.replicate(x, bins, 6)
    assert y.tolist() == [[1, 1, 3, 3, 3, 0], [4, 4, 6, 6, 6, 0]]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 0, 3], [2, 0, 3]]
    assert ops.repeat(x, (1, 1)) is x
    assert ops.repeat(x, (2, 1)).shape == (4, 3)
    assert ops.sum(x, 0).tolist() == [5, 7, 9]
    assert ops.sum(x[:1]).tolist() == [1, 2, 3]


def test_rows_have_autocasts_dtype() -> None:
    indices, bin_ids, _, bins, padded = sorted_slots(7, 2, 4)
    x = torch.randn(7, D, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        rows = [
            ops.gather(x, indices, bin_ids, bins, 2),
            ops.padded_gather(x, indices, bin_ids, bins, padded, 2),
            ops.binned_gather(x, indices, bins, 3, 2),
        ]
        y = ops.scatter(rows[0].float(), indices, bin_ids, None, bins, 2)
    assert {y.dtype, *(r.dtype for r in rows)} == {torch.bfloat16}
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full((7, D), 2.0))


def test_too_many_slots_are_refused() -> None:
    indices, bin_ids, _, bins, _ = sorted_slots(7, 2, 4)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="expected x to be a floating-point tensor"),
    ):
        ops.gather(torch.ones(7, D, dtype=torch.int32), indices, bin_ids, bins, 2)
    with pytest.raises(ValueError, match="expected at most 13 indices"):
        ops.gather(torch.ones(13, D), indices, bin_ids, bins, 1)
    with pytest.raises(ValueError, match=r"expected as many as torch\.int16 counts, got 40000"):
        ops.sort(torch.zeros(40000, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"rows \[experts, capacity, hidden\]"):
        ops.binned_scatter(torch.ones(4, D), indices, None, bins, 2)


def test_topology_names_each_experts_columns() -> None:
    padded = torch.tensor([2, 2, 5], dtype=torch.int32) * BLOCK
    found = ops.topology(padded, BLOCK, 5, 2)
    assert found.tolist() == [0, 1, 0, 1, 4, 5, 4, 5, 4, 5]
    assert found.dtype is torch.int16
    many = ops.topology(torch.tensor([1, 2]), 1, 2, 20_000)
    assert int(many[-1]) == 39_999  # beyond int16, in which MegaBlocks writes -25537


def test_a_layer_of_ones_own_computes_what_a_dmoe_does() -> None:
    """The forward pass of MegaBlocks' `ParallelDroplessMLP`, as people copied it."""
    layer = dMoE(
        MoEConfig(hidden_size=D, ffn_hidden_size=8, num_experts=4, top_k=2, activation="gelu_tanh")
    )
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    scores = (x @ layer.router.weight.T).softmax(-1)
    weights, top_experts = scores.topk(2)
    bin_ids, indices = ops.sort(top_experts.flatten().int(), 2)
    bins = ops.inclusive_cumsum(ops.histogram(top_experts.flatten(), 4), 0)
    rows = ops.gather(x, indices, bin_ids, bins, 2)
    w1, w2 = layer.experts.w1, layer.experts.w2
    of_experts = rows.tensor_split(bins[:-1].tolist())
    hidden = [F.gelu(r @ w.T, approximate="tanh") for r, w in zip(of_experts, w1, strict=True)]
    rows = torch.cat([h @ w.T for h, w in zip(hidden, w2, strict=True)])
    y = ops.scatter(rows, indices, bin_ids, weights.flatten(), bins, 2)
    expected = layer(x, routing=RouterOutput(weights, top_experts, scores, None))[0]
    torch.testing.assert_close(y, expected)
