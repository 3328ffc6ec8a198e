"""8-bit floats: the stated bound, NaN that stays visible, how far products are from exact ones."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import mb_kernels
import pytest
import torch
import torch.nn.functional as functions
from mb_kernels import bin_tokens, expert_mlp, float8_linear, reference, to_float8
from mb_kernels.runtime import checks
from mb_kernels.runtime.plan import assume, plan_for
from mb_kernels.targets import TARGETS
from mb_kernels.testing import (
    TOLERANCES,
    Case,
    assert_close,
    make_inputs,
    relative_error,
    run_expert_mlp,
)

SHAPES = [(3, 128), (2, 5, 256), (7, 16), (1, 720), (130, 33)]
# Rounding of two operands, each by up to a sixteenth, evenly distributed: 0.026 for each of them.
ROUNDING = 0.05


@pytest.fixture(params=["cpu", "gfx942"], autouse=True)
def kind(request):
    """The format: all that is here holds of a CPU's own, and of what it computes for an MI300."""
    torch.manual_seed(0)
    if request.param == "cpu":
        plan, kind = nullcontext(), torch.float8_e4m3fn
    else:
        plan = assume(partial(plan_for, TARGETS[request.param], units=1, hopper=False))
        kind = torch.float8_e4m3fnuz
    with plan:
        yield kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_stays_within_the_stated_bound(shape, transpose, dtype, kind):
    x = (torch.randn(shape) * torch.logspace(-4, 3, shape[-1])).to(dtype)
    codes, scales = to_float8(x, transpose=transpose)
    x = (x.mT if transpose else x).float()
    assert codes.shape == x.shape
    assert codes.is_contiguous()
    assert codes.dtype is kind
    assert scales.shape == x.shape[:-1]
    error = (codes.float() * scales[..., None] - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    bound = torch.maximum(x.abs() / 16, largest / 2**18)
    assert (error <= bound * (1 + 1e-5)).all()
    if x.numel() > 1000:
        assert (error > bound * 0.8).any()  # it is the bound of this format
    top = codes.float().abs().amax(-1)[largest[..., 0] > 0]  # in fp16 a column of one may be zero
    assert torch.equal(top, torch.full_like(top, torch.finfo(kind).max))


@pytest.mark.parametrize("transpose", [False, True])
def test_error_of_small_rows_stays_within_the_stated_bound(transpose):
    x = torch.randn(26, 128) * torch.logspace(-45, -20, 26)[:, None]
    codes, scales = to_float8(x.mT.contiguous() if transpose else x, transpose=transpose)
    error = (codes.double() * scales.double()[:, None] - x).abs()
    largest = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert (error <= torch.maximum(x.abs() / 16, largest / 2**18) * (1 + 1e-5)).all()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_non_finite_values_turn_their_row_into_nan(value, transpose):
    x = torch.ones(200, 300)
    x[3, 250] = value
    codes, scales = to_float8(x, transpose=transpose)
    restored = codes.float() * scales[:, None]
    row = 250 if transpose else 3
    assert restored[row].isnan().all()
    restored[row] = 1.0
    assert torch.equal(restored, torch.ones_like(restored))


def test_zeros_and_vanishing_rows_are_zeros():
    x = torch.zeros(4, 16)
    x[1], x[2] = 1e-40, -1e-40
    x[3] = -0.0  # a code of a negative zero is an MI300's NaN
    for transpose in (False, True):
        codes, scales = to_float8(x.mT if transpose else x, transpose=transpose)
        assert torch.equal(codes.float(), torch.zeros_like(codes, dtype=torch.float32))
        assert scales.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 0, 3)], ids=str)
def test_nothing_to_round(shape, kind):
    for transpose in (False, True):
        codes, scales = to_float8(torch.ones(shape), transpose=transpose)
        assert codes.dtype is kind
        assert codes.shape == (torch.ones(shape).mT if transpose else torch.ones(shape)).shape
        assert scales.shape == codes.shape[:-1]


def test_a_vector_has_no_rows():
    with pytest.raises(ValueError, match=r"expected \[\.\.\., R, C\]; got \(4,\)"):
        to_float8(torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading", [(5,), (2, 3, 4), (), (0,)], ids=str)
def test_a_linear_map(leading, dtype):
    x, w = torch.randn(*leading, 96).to(dtype), torch.randn(48, 96).to(dtype)
    bias, dy = torch.randn(48).to(dtype), torch.randn(*leading, 48).to(dtype)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    exact, y = functions.linear(*leaves), float8_linear(*leaves)
    assert y.dtype is dtype
    bound = ROUNDING if leading else 1.5 * ROUNDING  # of 48 numbers: up to 0.06 in 3,000 draws
    assert relative_error(y, exact) <= bound
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    want = torch.autograd.grad(exact, leaves, dy)
    assert relative_error(dx, want[0]) <= bound
    assert_close("dw", dw, want[1])  # of what was not rounded
    assert_close("db", db, want[2])
    if y.numel():
        assert relative_error(y, exact) > 1e-3
        assert relative_error(dx, want[0]) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3, 8), torch.ones(4, 9)), r"w_MK: expected \[M, K\]"),
        ((torch.ones(3, 8), torch.ones(4, 8), torch.ones(3)), r"bias_M: expected \[4\]"),
        ((torch.ones(3, 8), torch.ones(4, 8).double()), "dtype of x_NK"),
    ],
)
def test_wrong_arguments_of_a_linear_map(arguments, message):
    with pytest.raises(ValueError, match=message):
        float8_linear(*arguments)


def test_a_matrix_beyond_32_bit_offsets_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "use_triton", lambda x: True)
    huge = torch.zeros(1, 1).expand(2**16, 2**15)
    with pytest.raises(ValueError, match=r"w_MK: expected fewer than 2\*\*31 elements"):
        float8_linear(torch.zeros(1, 2**15), huge)
    with pytest.raises(ValueError, match=r"x: expected fewer than 2\*\*31 elements"):
        to_float8(huge, transpose=True)


CASES = [
    Case(60, 64, 96, 4, 2),
    Case(60, 64, 96, 4, 1, "skewed", activation="gelu", bias=torch.float32),
    Case(60, 64, 96, 8, 2, "empty_experts", transposed=(True, True)),
    Case(60, 64, 96, 4, 2, "skewed", 20, "squared_relu"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_are_as_far_from_exact_ones_as_rounding_makes_them(case):
    inputs = make_inputs(case, dtype=torch.float64)
    got = run_expert_mlp(expert_mlp, inputs, activation=case.activation, fp8=True)
    exact = run_expert_mlp(expert_mlp, inputs, activation=case.activation)
    errors = {name: relative_error(got[name], exact[name]) for name in got}
    b2 = errors.pop("d_b2", None)  # a sum of what is never rounded
    assert b2 is None or b2 <= TOLERANCES[torch.float64]
    assert max(errors.values()) <= 2.5 * ROUNDING, errors  # of two products one after another
    assert min(errors.values()) > 1e-3, errors


@pytest.mark.parametrize(
    "options", [{"recompute": True}, {"saved_activation_bits": 8}, {}], ids=str
)
def test_gradients_of_weights_are_products_of_what_was_not_rounded(options):
    """With weights and activations that eight bits hold, only the way back is rounded."""
    case = Case(40, 64, 32, 3, 2)
    inputs = make_inputs(case, dtype=torch.float64)
    got = run_expert_mlp(expert_mlp, inputs, fp8=True, **options)
    want = run_expert_mlp(reference.expert_mlp, inputs, fp8=True, **options)
    for name in want:
        assert_close(name, got[name], want[name])
    bins = bin_tokens(torch.zeros(40, 1, dtype=torch.int32), 1)
    x = torch.randn(40, 16, dtype=torch.float64).requires_grad_()
    w1 = torch.eye(16, dtype=torch.float64)[None].requires_grad_()
    w2 = torch.eye(16, dtype=torch.float64)[None].requires_grad_()
    dy = torch.randn(40, 16, dtype=torch.float64)
    weights = torch.ones(40, 1, dtype=torch.float64)
    y = expert_mlp(x, w1, w2, bins, weights, activation="relu", fp8=True, **(
        {} if "saved_activation_bits" in options else options
    ))  # fmt: skip
    d_w2 = torch.autograd.grad(y, w2, dy)[0][0]
    codes, scales = to_float8(x)
    a = (codes.double() * scales[:, None]).relu()
    assert_close("d_w2", d_w2, dy.mT @ a, dtype=torch.float32)


def test_a_second_derivative_is_not_promised_of_the_twin():
    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(8, 16)
    with pytest.raises(NotImplementedError, match="no fp8, whose rounding has none anywhere"):
        torch.autograd.grad(float8_linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="expected first derivatives alone"):
        torch.autograd.grad(reference.float8_linear(x, w).square().sum(), x, create_graph=True)


def test_gates_by_turns_are_refused():
    inputs = make_inputs(Case(8, 16, 16, 2, 1), dtype=torch.float32)
    with pytest.raises(ValueError, match="gate lies over up"):
        run_expert_mlp(expert_mlp, inputs, activation="swiglu(interleaved)", fp8=True)


def test_products_count_their_flops():
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(6, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mb_kernels.float8_linear(x, w).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 32 * 8


def test_a_fake_tensor_has_the_format_too(kind):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        codes, _ = to_float8(torch.ones(3, 16))
    assert codes.dtype is kind


@pytest.mark.parametrize(
    ("chip", "can"),
    [
        ("gfx942:sramecc+:xnack-", True),
        ("gfx950:sramecc+:xnack-", True),
        *(("gfx90a:sramecc+:xnack-", False), ("gfx1100", False), ("gfx1201", True)),
        *(((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)),
    ],
    ids=str,
)
def test_a_gpu_that_does_not_multiply_8_bit_floats_is_refused(monkeypatch, chip, can):
    pytest.importorskip("triton")
    if isinstance(chip, str):
        monkeypatch.setattr(torch.version, "hip", "7.1")
        properties = SimpleNamespace(gcnArchName=chip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    device, dtype = torch.device("cuda"), torch.bfloat16
    x = SimpleNamespace(is_cuda=True, is_meta=False, device=device, dtype=dtype)
    if can:
        checks.require_float8("x", x)
        x.dtype = torch.float16
        with pytest.raises(ValueError, match="x: expected bfloat16 for fp8 on a GPU"):
            checks.require_float8("x", x)
        checks.require_float8_codes(x)
    else:
        for require in (checks.require_float8_codes, partial(checks.require_float8, "x")):
            with pytest.raises(
                ValueError, match=r"fp8: .* \(gfx942, gfx950, gfx12\); got a GPU. Leave"
            ):
                require(x)
    x.dtype = torch.float64  # is the reference's
    checks.require_float8("x", x)
