"""Gather and combine against their definitions and each other."""

import pytest
import torch
from mb_kernels import Bins, bin_tokens, combine, gather
from mb_kernels.testing import assert_close, make_expert_ids

CASES = [(13, 6, 7, 3, None), (29, 16, 4, 2, 5), (0, 8, 4, 2, None), (17, 5, 3, 1, 4)]
IDS = ["T{}-D{}-E{}-K{}-C{}".format(*case) for case in CASES]


def make_case(tokens, hidden, experts, top_k, capacity):
    generator = torch.Generator().manual_seed(0)
    ids = make_expert_ids("skewed", tokens, experts, top_k, generator=generator)
    x = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    return x, bin_tokens(ids, experts, capacity=capacity), weights


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gather_takes_the_slots_token(case):
    x, bins, _ = make_case(*case)
    rows = gather(x, bins, case[3])
    for r, slot in enumerate(bins.order_N.tolist()):
        kept = r < bins.offsets_E1[-1]
        assert torch.equal(rows[r], x[slot // case[3]] if kept else torch.zeros(case[1]).double())


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_combine_sums_the_kept_slots(case):
    x, bins, weights = make_case(*case)
    rows = torch.randn(weights.numel(), case[1], dtype=torch.float64)
    rows[bins.offsets_E1[-1] :] = float("nan")  # rows of dropped slots are never read
    y = combine(rows, bins, weights)
    want = torch.zeros_like(x)
    for slot, row in enumerate(bins.inverse_N.tolist()):
        if row >= 0:
            t, k = divmod(slot, case[3])
            want[t] += weights[t, k] * rows[row]
    assert_close("y", y, want)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients(case):
    x, bins, weights = make_case(*case)
    x.requires_grad_()
    weights.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gather(x, bins, case[3]), (x,))
    rows = torch.randn(weights.numel(), case[1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: combine(r, bins, w), (rows, weights))


def test_rows_without_tokens_and_tokens_without_rows():
    none = torch.full((6,), -1, dtype=torch.int32)
    ends = torch.tensor([0, 6], dtype=torch.int32)
    padding = Bins(none, none[:0], ends.diff(), ends)
    x = torch.ones(0, 5, requires_grad=True)
    rows = gather(x, padding, 2)
    assert torch.equal(rows, torch.zeros(6, 5))
    dropped = Bins(none[:0], none, ends.diff() * 0, ends * 0)
    rows, weights = torch.ones(0, 5, requires_grad=True), torch.full((3, 2), float("nan"))
    y = combine(rows, dropped, weights.requires_grad_())
    assert torch.equal(y, torch.zeros(3, 5))
    gradients = torch.autograd.grad(y.sum(), (rows, weights))
    assert [g.shape for g in gradients] == [rows.shape, weights.shape]
    assert not gradients[1].any()


def test_wrong_sizes_are_named():
    x, bins, weights = make_case(*CASES[0])
    with pytest.raises(ValueError, match=r"expected 26 slots.*got 39"):
        gather(x, bins, 2)
    with pytest.raises(ValueError, match=r"top_k: expected an integer; got 3\.0"):
        gather(x, bins, 3.0)
    with pytest.raises(ValueError, match=r"expected \[39, D\].*\(13, 6\)"):
        combine(x, bins, weights)
