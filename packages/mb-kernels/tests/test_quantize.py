"""Quantised saved activations: the stated error bound, exact zeros, and NaN that stays visible."""

import mb_kernels
import pytest
import torch
from mb_kernels.quantize.op import GROUP_SIZE

SHAPES = [(3, 128), (2, 5, 256), (7, 16), (1, 720), (33, 130), (0, 64), (4, 0)]
LARGEST = {8: 127, 4: 7}


def group_maxima(x: torch.Tensor) -> torch.Tensor:
    """max|x| of the group of every element, in x's shape."""
    parts = x.abs().split(GROUP_SIZE, dim=-1)
    return torch.cat([p.amax(-1, keepdim=True).expand_as(p) for p in parts], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [s for s in SHAPES if 0 not in s], ids=str)
def test_error_stays_within_the_stated_bound(shape, bits, dtype):
    x = (torch.randn(shape) * torch.logspace(-4, 3, shape[-1])).to(dtype)
    codes, scales = mb_kernels.quantize(x, bits)
    restored = mb_kernels.dequantize(codes, scales, bits=bits, dtype=torch.float32)
    bound = group_maxima(x.float()) / (2 * LARGEST[bits])
    assert ((restored - x.float()).abs() <= bound * (1 + 1e-5)).all()
    assert (restored - x.float()).abs().max() > 0.1 * bound.max()  # it is the bound of this width
    in_dtype = mb_kernels.dequantize(codes, scales, bits=bits, dtype=dtype)
    assert in_dtype.dtype is dtype
    assert torch.equal(in_dtype, restored.to(dtype))


def test_nothing_passes_for_differentiable():
    codes, scales = mb_kernels.quantize(torch.randn(3, 16, requires_grad=True), 8)
    assert not scales.requires_grad
    scales.requires_grad_()
    y = mb_kernels.dequantize(codes, scales, bits=8, dtype=torch.float32)
    assert not y.requires_grad  # torch lets an op without a formula return what no gradient leaves


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_held(shape, bits):
    codes, scales = mb_kernels.quantize(torch.ones(shape), bits)
    rows = torch.Size(shape[:-1]).numel()
    assert codes.nbytes == rows * shape[-1] * bits // 8
    assert scales.nbytes == rows * -(-shape[-1] // GROUP_SIZE) * 4
    assert mb_kernels.dequantize(codes, scales, bits=bits, dtype=torch.bfloat16).shape == shape


@pytest.mark.parametrize("bits", [4, 8])
def test_multiples_of_the_scale_are_exact(bits):
    steps = torch.arange(-LARGEST[bits], LARGEST[bits] + 1, dtype=torch.float32)
    x = torch.cat([steps, steps[:1]])[None] * 0.25
    codes, scales = mb_kernels.quantize(x, bits)
    groups = x.shape[-1] // GROUP_SIZE or 1
    assert torch.equal(scales[..., :groups], torch.full((1, groups), 0.25))
    assert torch.equal(
        mb_kernels.dequantize(codes, scales, bits=bits, dtype=x.dtype)[:, :128], x[:, :128]
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_vanishing_groups_come_back_as_zeros(bits):
    x = torch.zeros(2, 256)
    x[1, :128] = 1e-45
    x[1, 128] = 3.0
    restored = mb_kernels.dequantize(*mb_kernels.quantize(x, bits), bits=bits, dtype=x.dtype)
    assert (restored[0] == 0).all()
    assert (restored[1, :128].abs() <= 1e-45).all()
    assert restored[1, 128] == 3.0


def test_a_scale_rounded_down_does_not_turn_the_sign():
    """136 of the least steps of fp32 over 127 is one such step, and 136 no code of a byte."""
    x = torch.full((1, 128), 136 * 2.0**-149)
    x[0, 1::2] *= -1
    restored = mb_kernels.dequantize(*mb_kernels.quantize(x, 8), bits=8, dtype=x.dtype)
    assert torch.equal(restored, x.sign() * (127 * 2.0**-149))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_of_a_dtype_stay_numbers(bits, dtype):
    """fp32's largest over 127 is rounded up: times the code it was infinite."""
    x = torch.full((1, 130), torch.finfo(dtype).max, dtype=dtype)
    x[0, 1::2] *= -1
    restored = mb_kernels.dequantize(*mb_kernels.quantize(x, bits), bits=bits, dtype=dtype)
    torch.testing.assert_close(restored, x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_non_finite_values_turn_their_group_into_nan(bits, value):
    x = torch.ones(1, 384)
    x[0, 200] = value
    restored = mb_kernels.dequantize(*mb_kernels.quantize(x, bits), bits=bits, dtype=x.dtype)
    assert restored[0, 128:256].isnan().all()
    assert torch.equal(restored[0, :128], x[0, :128])
    assert torch.equal(restored[0, 256:], x[0, 256:])


def test_strided_input_and_no_gradient():
    x = torch.randn(256, 6, requires_grad=True)
    codes, scales = mb_kernels.quantize(x.t(), 4)
    assert not scales.requires_grad
    assert torch.equal(codes, mb_kernels.quantize(x.detach().t().contiguous(), 4).codes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mb_kernels.quantize(torch.ones(4, 8), 3), "bits: expected 4 or 8; got 3"),
        (lambda: mb_kernels.quantize(torch.ones(4, 8), 8.0), "got 8.0 of type float"),  # equals 8
        (lambda: mb_kernels.quantize(torch.ones(4, 7), 4), "even last dimension"),
        (lambda: mb_kernels.quantize(torch.ones(4, 8).int(), 8), "x: expected float32"),
        (lambda: mb_kernels.quantize(torch.tensor(1.0), 8), r"\[\.\.\., C\]"),
        (
            lambda: mb_kernels.dequantize(
                *mb_kernels.quantize(torch.ones(4, 8), 8), bits=4, dtype=torch.float32
            ),
            "expected torch.uint8 for 4 bits",
        ),
        (
            lambda: mb_kernels.dequantize(
                torch.ones(4, 256).char(), torch.ones(4, 1), bits=8, dtype=torch.float32
            ),
            r"expected \(4, 2\)",
        ),
        (
            lambda: mb_kernels.dequantize(
                torch.tensor(1).char(), torch.tensor(1.0), bits=8, dtype=torch.float32
            ),
            "codes: expected one dimension at least",
        ),
    ],
    ids=["bits", "float", "odd", "integer", "scalar", "other-bits", "other-scales", "one-code"],
)
def test_errors_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_launch_of_a_wide_row_has_one_dimension(monkeypatch):
    pytest.importorskip("triton")
    from mb_kernels.quantize import kernels

    grids = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *a, **k: grids.append(grid))
    wide = torch.empty(1, 9_000_000, device="meta")  # 70,313 groups: a second dimension has 65,535
    kernels.dequantize(*kernels.quantize(wide, 8), 8, torch.float32)
    assert grids == [(70_313,), (70_313,)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_reference(shape, bits, dtype):
    x = torch.randn(shape).to(dtype)
    want = mb_kernels.quantize(x, bits)
    got = mb_kernels.quantize(x.cuda(), bits)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scales.cpu(), want.scales)
    restored = mb_kernels.dequantize(*got, bits=bits, dtype=dtype)
    assert torch.equal(restored.cpu(), mb_kernels.dequantize(*want, bits=bits, dtype=dtype))
