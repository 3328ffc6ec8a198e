"""The kernels of the router losses against the fp64 reference."""

import dataclasses

import pytest
import torch
from mb_kernels import reference, router_losses, topk_softmax
from mb_kernels.runtime.plan import assume, plan_on
from mb_kernels.testing import assert_close

WEIGHTS = {"load_balancing_weight": 0.3, "z_weight": 0.05}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("elsewhere", "score_function"),
    [(False, "softmax"), (True, "softmax"), (True, "sigmoid")],
    ids=["own counts", "global counts", "sigmoid"],
)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dtype"),
    [
        (37, 6, 2, torch.bfloat16),
        (5, 1, 1, torch.float32),
        (300, 128, 8, torch.float32),
        (5, 5000, 1, torch.float32),
        (2100, 5, 2, torch.float32),
        (0, 4, 2, torch.float32),
    ],
)
def test_kernels_equal_the_reference(tokens, experts, k, dtype, elsewhere, score_function):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(tokens, experts, generator=generator).mul(3).to(dtype).requires_grad_()
    # Every other probability of that token underflows, or every sigmoid of it.
    logits.data[:1, :1] = 400.0
    if score_function == "sigmoid" and experts > 1:  # whose entropy is not 0 anyway
        logits.data[:1] = logits.data[1:2] - 120.0
    _, ids, probs = topk_softmax(logits, k)
    bins = reference.bin_tokens(ids, experts, capacity=max(tokens * k // experts, 1))
    counts, kept = bins.tokens_per_expert_E, bins.offsets_E1[-1]
    other = torch.arange(experts, dtype=torch.int64) if elsewhere else None
    options = {"balance_counts_E": other, "score_function": score_function} | WEIGHTS
    probs = probs if score_function == "softmax" else None
    got = router_losses(logits, probs, counts, kept, **options)
    exact = logits.detach().double().requires_grad_()
    want = reference.router_losses(exact, None, counts, kept, **options)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_close(name, a, b, dtype=torch.float32)
    (d_got,) = torch.autograd.grad(2 * got.aux_loss, logits)
    (d_want,) = torch.autograd.grad(2 * want.aux_loss, exact)
    assert_close("d_logits", d_got, d_want)


@pytest.mark.parametrize("number", [torch.nan, -2.0, 0.5])
def test_any_number_of_tokens_divides_as_in_the_reference(number):
    logits = torch.randn(7, 5)
    _, ids, probs = topk_softmax(logits, 1)
    bins = reference.bin_tokens(ids, 5)
    arguments = (logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1])
    options = {"num_tokens": torch.tensor(number), **WEIGHTS}
    got, want = (f(*arguments, **options) for f in (router_losses, reference.router_losses))
    torch.testing.assert_close(got, want, equal_nan=True)


def test_the_entropy_of_large_logits():
    logits = torch.full((3, 64), 1e7)  # beside which fp32 has no room for log(64)
    _, ids, probs = topk_softmax(logits, 1)
    bins = reference.bin_tokens(ids, 64)
    got = router_losses(logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1], **WEIGHTS)
    assert_close("entropy", got.router_entropy, torch.tensor(64.0).log())


@pytest.mark.parametrize("kept_share", [0.6, 0.0])
@pytest.mark.parametrize("divide", [None, 11, 0.75])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_padding_other_divisors_and_meant_slots(kept_share, divide, score_function):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(300, 6, generator=generator).mul(3).requires_grad_()
    mask = torch.rand(300, generator=generator) < kept_share
    _, ids, probs = topk_softmax(logits, 2)
    bins = reference.bin_tokens(torch.where(mask[:, None], ids, -1), 6)
    options = {"mask_T": mask, "slots": bins.offsets_E1[-1] + 5} | WEIGHTS
    options["score_function"] = score_function
    probs = probs if score_function == "softmax" else None
    options["num_tokens"] = torch.tensor(divide) if divide == 11 else divide
    args = (bins.tokens_per_expert_E, bins.offsets_E1[-1])
    got = router_losses(logits, probs, *args, **options)
    exact = logits.detach().double().requires_grad_()
    want = reference.router_losses(exact, None, *args, **options)
    alone = reference.router_losses(exact[mask], None, *args, **(options | {"mask_T": None}))
    for name, a, b, c in zip(got._fields, got, want, alone, strict=True):
        assert_close(name, a, b, dtype=torch.float32)
        assert_close(name, b, c)
    (d_got,) = torch.autograd.grad(2 * got.aux_loss, logits)
    (d_want,) = torch.autograd.grad(2 * alone.aux_loss, exact)
    assert_close("d_logits", d_got, d_want, dtype=torch.float32)


def test_units_left_to_others_change_no_bit():
    """`MB_FREE_SMS`: sums are cut into as many parts as without it."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2100, 5, generator=generator).mul(3)
    _, ids, probs = topk_softmax(logits, 2)
    bins = reference.bin_tokens(ids, 5)
    plan = dataclasses.replace(plan_on(logits.device, logits.dtype), units=7)
    results = []
    for each in (plan, dataclasses.replace(plan, units=4, free_units=3)):
        with assume(lambda dtype, each=each: each):
            counts = bins.tokens_per_expert_E, bins.offsets_E1[-1]
            results.append(router_losses(logits, probs, *counts, **WEIGHTS))
    for name, one, other in zip(results[0]._fields, *results, strict=True):
        assert torch.equal(one, other), name
