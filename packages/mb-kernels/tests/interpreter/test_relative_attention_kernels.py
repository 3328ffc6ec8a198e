"""The kernels of attention with a bias by distance against the fp64 reference."""

import pytest
import torch
from mb_kernels import reference, relative_attention
from mb_kernels.runtime.plan import INTERPRETER_TILE, Plan
from mb_kernels.targets.table import Tile
from mb_kernels.testing import assert_close

CASES = [  # lengths, longest, heads, groups, width, causal, dtype
    pytest.param([37, 0, 1, 33], 37, 2, 1, 24, False, torch.float32, id="odd"),
    pytest.param([33, 64], 64, 2, 2, 16, True, torch.float32, id="causal"),
    pytest.param([3, 40], 70, 2, 2, 8, True, torch.float32, id="bias beyond all segments"),
    pytest.param([40, 5], 40, 3, 1, 16, False, torch.float16, id="fp16, three heads of a group"),
    pytest.param([18, 5], 18, 2, 1, 40, True, torch.bfloat16, id="bf16, in parts"),
    pytest.param([4], 4, 1, 1, 120, False, torch.float16, id="wide"),
    pytest.param([0, 0], 3, 2, 1, 16, False, torch.float32, id="no tokens"),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("lengths", "longest", "heads", "groups", "width", "causal", "dtype"), CASES
)
def test_kernels_equal_the_reference(lengths, longest, heads, groups, width, causal, dtype):
    check(lengths, longest, heads, groups, width, causal, dtype)


def check(lengths, longest, heads, groups, width, causal, dtype):
    generator = torch.Generator().manual_seed(2)
    tokens = sum(lengths)
    shapes = ((tokens, heads, width), (tokens, groups, width), (tokens, groups, width))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    bias = torch.randn(heads, 2 * longest - 1, generator=generator)
    bias[:, :1] = -torch.inf
    given = [t.requires_grad_() for t in (*tensors, bias)]
    exact = [t.detach().double().requires_grad_() for t in given]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weight = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    got = relative_attention(*given, offsets, causal=causal, scale=0.2)
    want = reference.relative_attention(*exact, offsets, causal=causal, scale=0.2)
    assert_close("y", got, want)
    names = ("dq", "dk", "dv", "d_bias")
    grads = (
        torch.autograd.grad((y * weight).sum(), xs, materialize_grads=True)
        for y, xs in ((got, given), (want, exact))
    )
    for name, g, w in zip(names, *grads, strict=True):
        assert_close(name, g, w, dtype=dtype)


def test_a_program_steps_otherwise_than_it_owns(monkeypatch):
    """Blocks of queries and of keys that differ, either way."""
    tiles = {"attention": Tile(16, 32, 128, 4, 2), "attention_dkv": Tile(32, 16, 128, 4, 2)}
    monkeypatch.setattr(Plan, "tile", lambda plan, op: tiles.get(op, INTERPRETER_TILE))
    check([35, 20], 40, 2, 1, 16, True, torch.float32)


def test_a_bias_without_gradient_and_tokens_that_see_nothing():
    q, k, v = (torch.randn(40, 1, 16).requires_grad_() for _ in range(3))
    bias, offsets = torch.zeros(1, 79), torch.tensor([0, 40])
    bias[:, 39:] = -torch.inf
    y = relative_attention(q, k, v, bias, offsets, causal=False)
    y.square().sum().backward()
    assert y[0].eq(0).all()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = reference.relative_attention(*exact, bias.double(), offsets, causal=False)
    assert_close("y", y, want, dtype=torch.float32)
    for got, grad in zip((q, k, v), torch.autograd.grad(want.square().sum(), exact), strict=True):
        assert_close("gradient", got.grad, grad, dtype=torch.float32)


@pytest.mark.parametrize("bias", [1e4, -1e30, 1e30, torch.finfo(torch.float32).min], ids=str)
def test_a_bias_that_drowns_the_products_keeps_the_gradients(bias):
    """All scores of a token are alike up to rounding: what it attends to is the mean."""
    q, (k, v, weight) = torch.zeros(40, 1, 16), torch.randn(3, 40, 1, 16)
    exact = [t.double() for t in (q, k, v, torch.zeros(1, 79))]
    found = []
    for given in ([q, k, v, torch.full((1, 79), bias)], exact):
        leaves = [t.detach().requires_grad_() for t in given]
        op = reference.relative_attention if given is exact else relative_attention
        y = op(*leaves, torch.tensor([0, 40]), causal=True)
        found.append([y, *torch.autograd.grad((y * weight).sum(), leaves)])
    for name, got, want in zip(("y", "dq", "dk", "dv", "d_bias"), *found, strict=True):
        assert_close(name, got, want, dtype=torch.float32)
