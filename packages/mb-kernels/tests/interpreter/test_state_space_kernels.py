"""The kernels of the scan of a state space against the fp64 reference."""

import pytest
import torch
from mb_kernels import reference, state_space_scan
from mb_kernels.runtime.plan import Plan
from mb_kernels.targets.table import Tile
from mb_kernels.testing import assert_close
from test_state_space import both, error_of_rates, make

CASES = [  # sequences, tokens, heads, groups, N, P; documents; dtype
    pytest.param((2, 70, 4, 2, 16, 8), True, torch.float32, id="documents"),
    pytest.param((1, 33, 3, 1, 24, 40), False, torch.float32, id="odd"),
    pytest.param((1, 40, 20, 2, 16, 16), False, torch.float32, id="heads in two parts"),
    pytest.param((2, 70, 4, 2, 8, 80), True, torch.float32, id="wide heads"),
    pytest.param((2, 1, 2, 2, 3, 5), True, torch.float32, id="a token"),
    pytest.param((2, 0, 2, 1, 4, 4), True, torch.float32, id="no tokens"),
    pytest.param((2, 3, 2, 1, 0, 4), True, torch.float32, id="no keys"),
    pytest.param((1, 40, 2, 1, 16, 48), True, torch.float16, id="fp16"),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "state", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["state", "none"]
)
@pytest.mark.parametrize(("sizes", "documents", "dtype"), CASES)
def test_kernels_equal_the_reference(sizes, documents, dtype, state):
    check(sizes, documents, dtype, state=state)


def check(sizes, documents, dtype, **options):
    tensors, begins = make(*sizes, dtype=dtype)
    begins = begins if documents else None
    got = both(state_space_scan, tensors, begins, state=options.get("state", True))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = both(reference.state_space_scan, exact, begins, state=options.get("state", True))
    for name, found in got.items():
        assert_close(name, found, want[name], dtype=dtype)


def test_heads_that_fade_at_once_leave_the_others_exact():
    tensors, begins = make(1, 70, 2, 1, 8, 8, dtype=torch.float32, fast=True)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = both(reference.state_space_scan, exact, begins)
    for name, got in both(state_space_scan, tensors, begins).items():
        assert_close(name, got, want[name])


def test_chunks_of_another_length(monkeypatch):
    monkeypatch.setattr(Plan, "tile", lambda plan, op: Tile(16, 16, 16, 4, 2))
    check((1, 40, 2, 1, 8, 16), True, torch.float32)


@pytest.mark.slow
def test_rates_of_heads_that_forget_at_once_have_their_gradient():
    assert error_of_rates(torch.bfloat16, longest=4) < 0.01
