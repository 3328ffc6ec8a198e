"""Router losses from their definitions in fp64; the op's gradient against autograd's."""

import math

import mb_kernels
import numpy as np
import pytest
import torch
from mb_kernels import bin_tokens, reference, router_losses, topk_softmax
from mb_kernels.testing import assert_close


def make(tokens, experts, k, *, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(tokens, experts, generator=generator).mul(2).to(device, dtype)
    logits.requires_grad_()
    _, ids, probs = topk_softmax(logits, k)
    bins = bin_tokens(ids, experts, capacity=max(tokens * k // experts, 1))
    return logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1]


WEIGHTS = {"load_balancing_weight": 0.3, "z_weight": 0.05}


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(37, 6, 2), (5, 1, 1), (64, 128, 8), (1, 3, 1)]
)
def test_values_are_their_definitions(tokens, experts, k):
    logits, probs, counts, kept = make(tokens, experts, k)
    got = router_losses(logits, probs, counts, kept, **WEIGHTS)
    balance = z = entropy = 0.0
    for t in range(tokens):
        weights = [math.exp(x) for x in logits[t].tolist()]
        p = [w / sum(weights) for w in weights]
        balance += experts * sum(n * q for n, q in zip(counts.tolist(), p, strict=True))
        z += math.log(sum(weights)) ** 2
        entropy -= sum(q * math.log(q) for q in p)
    balance /= tokens * tokens * k
    assert got.load_balancing_loss.item() == pytest.approx(balance)
    assert got.z_loss.item() == pytest.approx(z / tokens)
    assert got.router_entropy.item() == pytest.approx(entropy / tokens, abs=1e-12)
    assert got.aux_loss.item() == pytest.approx(0.3 * balance + 0.05 * z / tokens)
    assert got.load_imbalance.item() == pytest.approx(max(counts.tolist()) * experts / tokens / k)
    assert got.dropped_fraction.item() == pytest.approx(1 - kept.item() / (tokens * k))


@pytest.mark.parametrize(("tokens", "experts"), [(37, 6), (5, 1), (0, 4)])
@pytest.mark.parametrize("share", [None, 0.5, 0.0])
def test_sigmoids_are_divided_by_their_sum(tokens, experts, share):
    logits, _, counts, kept = make(tokens, experts, 1)
    mask = None if share is None else torch.arange(tokens) < share * tokens
    options = {"score_function": "sigmoid", "mask_T": mask, "num_tokens": 9} | WEIGHTS
    got = router_losses(logits, None, counts, kept, **options)
    real = logits if mask is None else logits[mask]
    p = 1 / (1 + (-real).exp())
    p = p / p.sum(dim=1, keepdim=True)
    balance = experts * (p.sum(dim=0) * counts).sum() / max(counts.sum().item(), 1) / 9
    z = real.exp().sum(dim=1).log().square().sum() / 9
    assert_close("balance", got.load_balancing_loss, balance.detach())
    assert_close("z", got.z_loss, z.detach())
    assert_close("entropy", got.router_entropy, -(p * p.log()).sum().detach() / 9)
    assert_close("aux_loss", got.aux_loss, 0.3 * balance + 0.05 * z)
    d_got, d_want = (
        torch.autograd.grad(loss, logits)[0] for loss in (got.aux_loss, 0.3 * balance + 0.05 * z)
    )
    assert_close("d_logits", d_got, d_want)


def test_sigmoids_that_all_underflow_have_shares():
    logits, _, counts, kept = make(9, 6, 1)
    options = {"score_function": "sigmoid"} | WEIGHTS
    low = (logits.detach() - 800).float().requires_grad_()  # sigmoid is exp there, shares softmax
    got = router_losses(low, None, counts, kept, **options)
    want = router_losses(low.detach(), low.detach().softmax(dim=1), counts, kept, **WEIGHTS)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b, dtype=torch.float32)


@pytest.mark.parametrize("kept_share", [0.5, 0.0])
@pytest.mark.parametrize("divide", [None, 7, 0.75, 0])
def test_padding_counts_nowhere(kept_share, divide):
    logits, probs, counts, kept = make(29, 5, 2)
    mask = torch.rand(29, generator=torch.Generator().manual_seed(1)) < kept_share
    options = {"num_tokens": divide, "slots": kept + 9} | WEIGHTS
    got = router_losses(logits, probs, counts, kept, mask_T=mask, **options)
    want = reference.router_losses(logits[mask], probs[mask], counts, kept, **options)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b)
    meant = kept.item() + 9  # the reference, which is the op on a CPU, has to count them too
    assert got.dropped_fraction.item() == pytest.approx(9 / meant)
    assert got.load_imbalance.item() == pytest.approx(counts.max().item() * 5 / meant)
    tokens = mask.sum().item() if divide is None else divide
    squares = torch.logsumexp(logits[mask], dim=1).square().sum().detach()
    assert_close("z", got.z_loss, squares / (tokens or 1))
    d_got, d_want = (torch.autograd.grad(r.aux_loss, logits)[0] for r in (got, want))
    assert_close("d_logits", d_got, d_want)


@pytest.mark.parametrize("slots", [0, 1])
def test_few_slots_or_none_have_a_gradient(slots):
    """Where all tokens are another rank's, or padding, no slot is counted."""
    logits, probs, counts, _ = make(1, 3, 1)
    counts = counts * slots
    losses = [
        op(logits, probs, counts, torch.tensor(0), **WEIGHTS)
        for op in (router_losses, reference.router_losses)
    ]
    got, want = (torch.autograd.grad(loss.aux_loss, logits)[0] for loss in losses)
    assert want.isfinite().all()
    assert_close("d_logits", got, want)
    assert [loss.dropped_fraction.item() for loss in losses] == [slots, slots]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own counts", "global counts"])
def test_gradient_reaches_the_logits_alone(elsewhere):
    logits, probs, counts, kept = make(23, 7, 2)
    other = torch.tensor([9, 0, 4, 1, 30, 2, 2]) if elsewhere else None
    losses = [
        op(logits, probs, counts, kept, balance_counts_E=other, **WEIGHTS)
        for op in (router_losses, reference.router_losses)
    ]
    assert not any(value.requires_grad for each in losses for value in each[1:])
    got, want = (torch.autograd.grad(3 * loss.aux_loss, logits)[0] for loss in losses)
    assert_close("d_logits", got, want)
    for name, a, b in zip(losses[0]._fields, *losses, strict=True):
        assert_close(name, a, b)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_losses_of_16_bit_logits_are_computed_in_fp32(score_function):
    logits, _, counts, kept = make(23, 7, 2, dtype=torch.bfloat16)
    probs = torch.softmax(logits.float(), dim=1) if score_function == "softmax" else None
    options = {"score_function": score_function} | WEIGHTS
    want = router_losses(logits.float(), probs, counts, kept, **options)
    for module in (mb_kernels, reference):
        got = module.router_losses(logits, probs, counts, kept, **options)
        for name, a, b in zip(want._fields, got, want, strict=True):
            assert_close(name, a, b)
        d_got, d_want = (
            torch.autograd.grad(x.aux_loss, logits, retain_graph=True)[0] for x in (got, want)
        )
        assert_close("d_logits", d_got, d_want)


def test_balanced_load_is_one():
    logits = torch.zeros(64, 16, requires_grad=True)
    probs = torch.softmax(logits, dim=-1)
    counts = torch.full((16,), 8, dtype=torch.int32)
    got = router_losses(logits, probs, counts, counts.sum(), load_balancing_weight=0.1, z_weight=0)
    assert got.load_balancing_loss.item() == 1
    assert got.load_imbalance.item() == 1
    assert got.dropped_fraction.item() == 0


def test_zero_tokens_give_zeros():
    logits, probs, counts, kept = make(0, 4, 2)
    got = router_losses(logits, probs, counts, kept, **WEIGHTS)
    assert [value.item() for value in got] == [0.0] * 6
    assert torch.autograd.grad(got.aux_loss, logits)[0].shape == (0, 4)


@pytest.mark.parametrize("module", [mb_kernels, reference], ids=["op", "reference"])
def test_what_is_no_number_of_tokens_does_not_pass_for_one(module):
    """A NaN, of 0 / 0 say, divided by 1: the loss was the sum over all tokens."""
    *arguments, kept = make(5, 4, 2)
    got = [
        module.router_losses(*arguments, kept, num_tokens=torch.tensor(number), **WEIGHTS).aux_loss
        for number in (torch.nan, -2.0, 2.0)
    ]
    assert got[0].isnan()
    assert got[1] == -got[2]


def test_wrong_shapes_are_named():
    logits, probs, counts, kept = make(5, 4, 2)
    with pytest.raises(ValueError, match=r"logits_TE: .* one expert at least; got \(5, 0\)"):
        router_losses(logits[:, :0], probs[:, :0], counts[:0], kept, **WEIGHTS)
    with pytest.raises(ValueError, match=r"probs_TE: expected the shape .* got \(5, 3\)"):
        router_losses(logits, probs[:, :3], counts, kept, **WEIGHTS)
    with pytest.raises(ValueError, match=r"balance_counts_E: expected one count .* 4 experts"):
        router_losses(logits, probs, counts, kept, balance_counts_E=counts[:2], **WEIGHTS)
    with pytest.raises(ValueError, match=r"mask_T: expected bool, one for each of 5 tokens"):
        router_losses(logits, probs, counts, kept, mask_T=counts, **WEIGHTS)
    with pytest.raises(ValueError, match=r"num_tokens: expected one number; got \(2,\)"):
        router_losses(logits, probs, counts, kept, num_tokens=torch.ones(2), **WEIGHTS)
    with pytest.raises(ValueError, match=r"kept_slots: expected a scalar tensor on cpu; got 10"):
        router_losses(logits, probs, counts, 10, **WEIGHTS)
    with pytest.raises(ValueError, match=r"kept_slots: .* got None\. Pass bins\.offsets_E1\[-1\]"):
        router_losses(logits, probs, counts, None, **WEIGHTS)
    with pytest.raises(ValueError, match=r"slots: expected a scalar tensor on cpu; got 10\. Make"):
        router_losses(logits, probs, counts, kept, slots=10, **WEIGHTS)
    with pytest.raises(ValueError, match="expected softmax or sigmoid; got 'softplus'"):
        router_losses(logits, probs, counts, kept, score_function="softplus", **WEIGHTS)
    with pytest.raises(ValueError, match="None with score_function='sigmoid'; got a tensor with"):
        router_losses(logits, probs, counts, kept, score_function="sigmoid", **WEIGHTS)
    with pytest.raises(ValueError, match=r"probs_TE: expected the softmax .* got None with 'softm"):
        router_losses(logits, None, counts, kept, **WEIGHTS)
    learned = WEIGHTS | {"z_weight": torch.tensor(0.5, requires_grad=True)}
    with pytest.raises(ValueError, match="z_weight: expected a number, which has no gradient"):
        router_losses(logits, probs, counts, kept, **learned)


def test_compiles_without_graph_breaks():
    def aux(logits):
        _, ids, probs = topk_softmax(logits, 2)
        bins = bin_tokens(ids, 6)
        args = (logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1])
        return router_losses(*args, **WEIGHTS).aux_loss

    logits = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(aux, fullgraph=True, backend="aot_eager")
    assert_close("aux", compiled(logits), aux(logits))
    got, want = (torch.autograd.grad(f(logits), logits)[0] for f in (compiled, aux))
    assert_close("d_logits", got, want)


@pytest.mark.parametrize("module", [mb_kernels, reference], ids=["op", "reference"])
def test_a_number_of_tokens_in_fp64_leaves_losses_in_fp32(module):
    logits, probs, counts, kept = make(8, 4, 1, dtype=torch.float32)
    want = module.router_losses(logits, probs, counts, kept, num_tokens=5.0, **WEIGHTS)
    number = torch.tensor(5.0, dtype=torch.float64)
    got = module.router_losses(logits, probs, counts, kept, num_tokens=number, **WEIGHTS)
    for name, value in want._asdict().items():  # the dtype too
        torch.testing.assert_close(getattr(got, name), value)


@pytest.mark.parametrize("number", [1001.0, np.int64(1001)], ids=["float", "of-numpy"])
@pytest.mark.parametrize("module", [mb_kernels, reference], ids=["op", "reference"])
def test_a_number_of_tokens_is_not_rounded_to_the_default_dtype(module, number):
    logits, probs, counts, kept = make(8, 4, 1)
    options = {"num_tokens": number} | WEIGHTS
    want = module.router_losses(logits, probs, counts, kept, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = module.router_losses(logits, probs, counts, kept, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.aux_loss == want.aux_loss


@pytest.mark.parametrize("losses", [router_losses, reference.router_losses])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_padding_that_is_no_number_has_no_gradient(losses, score_function):
    logits = torch.randn(6, 4)
    logits[4:] = torch.nan
    mask = torch.arange(6) < 4
    logits.requires_grad_()
    probs = None if score_function == "sigmoid" else torch.softmax(logits.detach(), -1)
    counts = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
    options = {"mask_T": mask, "score_function": score_function} | WEIGHTS
    losses(logits, probs, counts, counts.sum(), **options).aux_loss.backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[4:].any()
    assert logits.grad[:4].any()
