import pytest
import torch
from mb_kernels import is_glu
from mb_kernels.activation import (
    GLU_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Activation,
    _gelu_tanh_by_sigmoid,
    activate,
    activate_backward,
    activate_gated,
    parse,
)
from mb_kernels.testing import NUMBERED


@pytest.mark.parametrize("name", [*GLU_ACTIVATIONS, "swigluoai", *NUMBERED, *PLAIN_ACTIVATIONS])
def test_derivative_matches_autograd(name):
    generator = torch.Generator().manual_seed(0)
    h = 3 * torch.randn(7, 10, generator=generator, dtype=torch.float64)
    h.requires_grad_()
    a = activate(h, name)
    d_a = torch.randn(a.shape, generator=generator, dtype=torch.float64)
    (want,) = torch.autograd.grad(a, h, d_a)
    torch.testing.assert_close(activate_backward(d_a, h, name), want)


def test_gelu_that_is_compiled_is_gelu():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    want = torch.nn.functional.gelu(every.double(), approximate="tanh")
    got = _gelu_tanh_by_sigmoid(every)
    assert torch.equal(got.isnan(), want.isnan())
    some = every.isfinite() & (want.abs() > 1e-12)  # below, 1 + tanh cancels, in fp64 too
    assert (got.double() / want - 1).abs()[some].max() < 2**-8  # of bf16, rounded once
    z = torch.linspace(-30, 30, 999, dtype=torch.float64, requires_grad=True)
    values = _gelu_tanh_by_sigmoid(z), torch.nn.functional.gelu(z, approximate="tanh")
    slopes = [torch.autograd.grad(value.sum(), z)[0] for value in values]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*slopes)


def test_glu_puts_gate_over_up():
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    got = activate(torch.cat([gate, up], dim=-1), "swiglu")
    torch.testing.assert_close(got, gate * torch.sigmoid(gate) * up)


def test_names():
    assert [is_glu(name) for name in ("swiglu", "geglu", "gelu", "squared_relu")] == [
        True,
        True,
        False,
        False,
    ]
    assert parse("geglu_tanh") == Activation("gelu_tanh", gated=True)
    assert parse("swigluoai") == parse("swiglu(alpha=1.702, limit=7, offset=1)")
    assert parse("geglu( limit = 1e1 ,interleaved)") == Activation(
        "gelu", gated=True, limit=10, interleaved=True
    )


def test_numbers_do_what_the_formulas_say():
    gate, up = 3 * torch.randn(2, 5, 8, dtype=torch.float64)
    bounded, between = gate.clamp(max=2), up.clamp(-2, 2)
    for name, want in (
        ("swiglu(limit=2)", bounded * torch.sigmoid(bounded) * between),
        (
            "swiglu(alpha=1.7, limit=2, offset=1)",
            bounded * torch.sigmoid(1.7 * bounded) * (between + 1),
        ),
        ("reglu(offset=0.5)", gate.relu() * (up + 0.5)),
        (
            "swiglu(gate_cap=4, up_cap=5)",
            4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 5 * torch.tanh(up / 5),
        ),
    ):
        torch.testing.assert_close(activate_gated(gate, up, name), want)
        torch.testing.assert_close(activate(torch.cat([gate, up], dim=-1), name), want)
        by_turns = torch.stack([gate, up], dim=-1).flatten(-2)
        interleaved = name.replace(")", ", interleaved)")
        torch.testing.assert_close(activate(by_turns, interleaved), want)


def test_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"swiglu, .*squared_relu, .*; got 'swigul'.* Use 'swiglu'"
    ):
        is_glu("swigul")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gelu(limit=1)", "the first 4 with numbers in brackets"),
        ("swiglu(limit=1", "a closing bracket"),
        ("swiglu(limt=1)", "limit=<number>.*got limt=1"),
        ("swiglu(limit=a)", "got limit=a"),
        ("swiglu(limit=-1)", "all but offset above 0; got limit=-1"),
        ("swiglu(limit=inf)", "got limit=inf"),
        ("swiglu(offset=nan)", "got offset=nan"),
        ("swiglu(limit=1, limit=2)", "limit twice"),
        ("swiglu()", "got ="),
        ("geglu(alpha=2)", "with swiglu alone"),
        ("reglu(up_cap=2)", "with swiglu alone"),
        ("swiglu(limit=1, up_cap=2)", "caps without"),
    ],
)
def test_numbers_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        is_glu(name)
