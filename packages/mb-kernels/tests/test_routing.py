"""Routing against loops in plain Python; gradients against autograd of the reference."""

import types

import pytest
import torch
from mb_kernels import bin_tokens, reference, topk_ids, topk_softmax
from mb_kernels.runtime import registration
from mb_kernels.testing import ROUTINGS, assert_close, make_expert_ids


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(13, 7, 3), (5, 1, 1), (33, 64, 8), (0, 4, 2)]
)
def test_topk_softmax_matches_definition(tokens, experts, k, renormalize):
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1))
    weights, ids, probs = topk_softmax(logits, k, renormalize=renormalize)
    assert (weights.dtype, ids.dtype, probs.dtype) == (torch.float32, torch.int32, torch.float32)
    for t in range(tokens):
        p = torch.softmax(logits[t].double(), dim=0)
        best = sorted(range(experts), key=lambda e: (-logits[t, e].item(), e))[:k]
        chosen = p[best] / p[best].sum() if renormalize else p[best]
        assert ids[t].tolist() == best
        assert_close("weights", weights[t], chosen)
        assert_close("probs", probs[t], p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_topk_softmax_of_16_bits_is_computed_in_fp32(dtype):
    logits = torch.randn(13, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = topk_softmax(logits.float(), 3, renormalize=True)
    for module in (topk_softmax, reference.topk_softmax):
        weights, ids, probs = module(logits, 3, renormalize=True)
        assert torch.equal(ids, want[1])
        for name, got, exact in (("weights", weights, want[0]), ("probs", probs, want[2])):
            assert got.dtype is torch.float32
            assert_close(name, got, exact)


def test_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    assert topk_softmax(logits, 4)[1].tolist() == [[1, 2, 4, 0]]
    assert topk_ids(logits, 4).tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(13, 7, 3), (5, 1, 1), (33, 64, 8), (0, 4, 2), (3, 5, 5)]
)
def test_topk_ids_are_of_the_largest_scores_of_any_kind(tokens, experts, k, dtype):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(tokens, experts, generator=generator).round(decimals=1).to(dtype)
    scores.requires_grad_()
    with torch.no_grad():
        scores[:, :1] = -torch.inf
        scores[1:3, -1:] = torch.inf
    ids = topk_ids(scores, k)
    assert ids.dtype is torch.int32
    assert not ids.requires_grad
    for t in range(tokens):
        best = sorted(range(experts), key=lambda e: (-scores[t, e].item(), e))[:k]
        assert ids[t].tolist() == best


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize("use", ["weights", "probs", "both"])
def test_topk_softmax_gradient(use, renormalize):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(11, 9, generator=generator, dtype=torch.float64, requires_grad=True)

    def loss(op):
        weights, _, probs = op(logits, 4, renormalize=renormalize)
        generator.manual_seed(3)
        d_weights = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        d_probs = torch.randn(probs.shape, generator=generator, dtype=torch.float64)
        return (weights * d_weights).sum() * (use != "probs") + (probs * d_probs).sum() * (
            use != "weights"
        )

    (got,) = torch.autograd.grad(loss(topk_softmax), logits)
    (want,) = torch.autograd.grad(loss(reference.topk_softmax), logits)
    assert_close("d_logits", got, want)


def test_topk_softmax_gradient_has_the_dtype_of_the_logits():
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    topk_softmax(logits, 2)[0].sum().backward()
    assert logits.grad.dtype is torch.bfloat16


def bins_by_hand(ids, num_experts, capacity):
    """Order, inverse, counts and offsets by appending slots to lists."""
    kept, dropped = [[] for _ in range(num_experts)], [[] for _ in range(num_experts)]
    counts, outside = [0] * num_experts, []
    for slot, e in enumerate(ids.flatten().tolist()):
        if not 0 <= e < num_experts:
            outside.append(slot)
            continue
        counts[e] += 1
        full = capacity is not None and len(kept[e]) >= capacity
        (dropped if full else kept)[e].append(slot)
    order = [slot for rows in kept for slot in rows]
    offsets = [0]
    for rows in kept:
        offsets.append(offsets[-1] + len(rows))
    inverse = [-1] * ids.numel()
    for row, slot in enumerate(order):
        inverse[slot] = row
    behind = [slot for rows in dropped for slot in rows] + outside
    return order + behind, inverse, counts, offsets


@pytest.mark.parametrize("capacity", [None, 0, 1, 5], ids=lambda c: f"C{c}")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(37, 8, 2), (1, 1, 1), (0, 5, 2), (64, 3, 3)])
def test_bin_tokens_matches_lists(tokens, experts, k, routing, capacity):
    if routing == "empty_experts" and 2 * k > experts:
        pytest.skip("top_k fills every expert")
    ids = make_expert_ids(routing, tokens, experts, k, generator=torch.Generator().manual_seed(4))
    bins = bin_tokens(ids, experts, capacity=capacity)
    assert all(field.dtype is torch.int32 for field in bins)
    assert [field.tolist() for field in bins] == list(bins_by_hand(ids, experts, capacity))


def test_a_capacity_that_follows_the_tokens_compiles_once():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def bins(ids):
        return bin_tokens(ids, 3, capacity=ids.shape[0] // 2)

    torch._dynamo.reset()
    compiled = torch.compile(bins, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 8, 13):
        ids = torch.arange(2 * tokens).view(tokens, 2) % 3
        for got, want in zip(compiled(ids), bins(ids), strict=True):
            assert torch.equal(got, want)
    assert len(graphs) == 1


def test_ids_outside_the_experts_are_dropped():
    ids = torch.tensor([[0, -1], [5, 1], [1, 0]], dtype=torch.int32)
    bins = bin_tokens(ids, 2)
    assert [field.tolist() for field in bins] == list(bins_by_hand(ids, 2, None))
    assert bins.order_N.tolist() == [0, 5, 3, 4, 1, 2]


@pytest.mark.parametrize("wrong", [-2, 3, 2**31])
def test_debug_refuses_ids_of_no_expert(wrong, monkeypatch):
    ids = torch.tensor([[0, 1], [2, -1], [wrong, 1], [0, wrong]])
    assert bin_tokens(ids, 2).tokens_per_expert_E.tolist() == [2, 2]
    monkeypatch.setattr(registration, "_debug", True)
    message = rf"expected 0 to 1, or -1 or 2 .* got {wrong} at \[2, 0\], the first of 2 .*Pass"
    with pytest.raises(ValueError, match=message):
        bin_tokens(ids, 2)
    compiled = torch.compile(bin_tokens, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=message):
        compiled(ids, 2)


def test_debug_passes_ids_that_route_or_mark_nobody(monkeypatch):
    ids = torch.tensor([[0, 1], [2, -1]])
    monkeypatch.setattr(registration, "_debug", True)
    assert bin_tokens(ids, 2).order_N.tolist() == [0, 1, 2, 3]
    assert bin_tokens(ids[:0], 2).tokens_per_expert_E.tolist() == [0, 0]


def test_debug_looks_at_nothing_while_a_graph_is_captured(monkeypatch):
    on_gpu, on_cpu = types.SimpleNamespace(is_cuda=True), torch.zeros(1)
    assert not registration.debugging(on_cpu)
    monkeypatch.setattr(registration, "_debug", True)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert registration.debugging(on_gpu) is not capturing
        assert registration.debugging(on_cpu)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topk_softmax(torch.zeros(2, 3, 4), 1), r"\[tokens, experts\].*\(2, 3, 4\)"),
        (lambda: topk_softmax(torch.zeros(2, 3), 4), "expected 1 to 3, .*got 4"),
        (lambda: topk_ids(torch.zeros(2, 3, dtype=torch.int32), 1), "scores_TE: .*got torch.int32"),
        (lambda: topk_ids(torch.zeros(2, 3), 0), "expected 1 to 3, .*got 0"),
        (lambda: bin_tokens(torch.zeros(4, dtype=torch.int32), 2), r"\[tokens, top_k\]"),
        (lambda: bin_tokens(torch.zeros(4, 1), 2), "int32 or int64"),
        (lambda: bin_tokens(torch.zeros(4, 1, dtype=torch.int32), 0), "at least 1; got 0"),
        (
            lambda: bin_tokens(torch.zeros(4, 1, dtype=torch.int32), 2, capacity=-1),
            "at least 0; got -1",
        ),
        (lambda: topk_ids(torch.zeros(2, 3), 2.0), r"k: expected an integer; got 2\.0"),
        (
            lambda: bin_tokens(torch.zeros(4, 1, dtype=torch.int32), 2, capacity=2.5),
            r"capacity: expected an integer; got 2\.5",
        ),
        (lambda: topk_softmax([[0.0, 1.0]], 1), "logits_TE: expected a tensor; got a list"),
        (lambda: topk_ids(torch.zeros(2, 3).numpy(), 1), "expected a tensor; got a ndarray"),
        (lambda: bin_tokens([[0], [1]], 2), "expert_ids_TK: expected a tensor; got a list"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
