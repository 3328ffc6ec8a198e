import pytest
import torch
from mb_kernels import is_glu
from mb_kernels.activation import (
    GLU_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    activate,
    activate_backward,
    base_function,
)


@pytest.mark.parametrize("name", [*GLU_ACTIVATIONS, *PLAIN_ACTIVATIONS])
def test_derivative_matches_autograd(name):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(7, 10, generator=generator, dtype=torch.float64, requires_grad=True)
    a = activate(h, name)
    d_a = torch.randn(a.shape, generator=generator, dtype=torch.float64)
    (want,) = torch.autograd.grad(a, h, d_a)
    torch.testing.assert_close(activate_backward(d_a, h, name), want)


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
    assert base_function("geglu_tanh") == "gelu_tanh"


def test_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(ValueError, match=r"swiglu, .*squared_relu; got 'swigul'\. Use 'swiglu'\?"):
        is_glu("swigul")
