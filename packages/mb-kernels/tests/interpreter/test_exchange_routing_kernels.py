"""What travels beside a token: the kernels that pack and unpack it against their references."""

import pytest
import torch
from mb_kernels.exchange import pack_routing, unpack_routing
from mb_kernels.exchange import routing_reference as reference

ROUTINGS = [
    # tokens, top_k, experts, ranks
    (5, 2, 4, 2),
    (0, 1, 4, 2),
    (1030, 1, 6, 3),  # more than one program
    (7, 3, 64, 4),  # a column for each choice
    (6, 3, 4, 4),  # more choices than experts on a rank
    (5, 2, 2, 6),  # ranks that share an expert
    (4, 1, 1, 3),
]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "ranks"), ROUTINGS)
def test_routing_packed_and_unpacked(tokens, top_k, experts, ranks):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
    if tokens:
        ids[0] = 0  # chosen twice
    weights = torch.rand(tokens, top_k, generator=generator, requires_grad=True)
    packed = pack_routing(weights, ids, num_experts=experts, ranks=ranks)
    words, peers, counts = reference.pack_routing(weights.detach(), ids, experts, ranks)
    assert torch.equal(packed.words_TW, words)
    assert torch.equal(packed.peers_TC, peers)
    assert torch.equal(packed.tokens_per_expert_E, counts[:-1])
    assert packed.slots == ((ids >= 0) & (ids < experts)).sum()

    rows = torch.cat([packed.words_TW] * ranks)
    came = torch.randint(0, tokens + 1, (ranks,), generator=generator, dtype=torch.int32)
    for counts_P in (None, came):
        if counts_P is not None:  # what did not come holds anything
            absent = torch.arange(tokens) >= counts_P[:, None]
            rows = rows.masked_fill(absent.view(-1, 1), torch.nan)
        for rank in range(ranks):
            sizes = {"num_experts": experts, "ranks": ranks, "rank": rank}
            got = unpack_routing(rows, **sizes, counts_P=counts_P)
            per_rank = max(experts // ranks, 1)
            first = rank // max(ranks // experts, 1) * per_rank
            want = reference.unpack_routing(rows.detach(), counts_P, first, per_rank)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
            scale = torch.rand(got[0].shape, generator=generator)
            (grad,) = torch.autograd.grad((got[0] * scale).sum(), rows, retain_graph=True)
            backward = reference.unpack_routing_backward(scale, want[2])
            assert torch.equal(grad, torch.cat((backward, torch.zeros_like(backward)), 1))
    rows = unpack_routing(packed.words_TW, num_experts=experts, ranks=1, rank=0)[0]
    (grad,) = torch.autograd.grad(rows.sum(), weights)
    assert torch.equal(grad, ((ids >= 0) & (ids < experts)).float())


def test_an_infinite_weight_stays_with_its_expert():
    words = torch.tensor([[torch.inf, 0.5, 0.25, 1, 0, 7]])  # weights beside ids
    for weights, *_ in (
        unpack_routing(words, num_experts=8, ranks=4, rank=0),
        reference.unpack_routing(words, None, 0, 2),
    ):
        assert weights.tolist() == [[0.5, torch.inf]]


def test_routing_that_cannot_be_packed_is_refused():
    weights, ids = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    sizes = {"num_experts": 4, "ranks": 2}
    for says, given, changed in (
        (r"expert_ids_TK: expected \[T, K\]", (weights, ids[:2]), {}),
        ("expert_ids_TK: expected int32", (weights, weights), {}),
        ("ranks: expected to divide", (weights, ids), {"ranks": 3}),
    ):
        with pytest.raises(ValueError, match=says):
            pack_routing(*given, **(sizes | changed))
    for says, words, changed in (
        (r"words_RW: expected \[R, 2K\]", torch.ones(3, 3), {}),
        ("words_RW: expected float32", weights.half(), {}),
        ("rank: expected 0 to 1", weights, {"rank": 2}),
        (r"counts_P: expected \[2\]", weights, {"counts_P": ids[:, 0]}),
    ):
        with pytest.raises(ValueError, match=says):
            unpack_routing(words, **(sizes | {"rank": 0} | changed))
