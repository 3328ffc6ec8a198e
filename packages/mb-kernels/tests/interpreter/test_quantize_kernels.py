"""The kernels of codes and scales in Triton's interpreter, bit for bit the reference."""

import itertools
from functools import partial

import mb_kernels
import pytest
import torch
from mb_kernels import reference
from mb_kernels.runtime.plan import assume, plan_for
from mb_kernels.targets import TARGETS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 128), (2, 5, 256), (7, 16), (33, 130), (0, 64)], ids=str)
def test_equal_to_the_reference(shape, bits, dtype):
    x = torch.randn(shape).to(dtype)
    got, want = mb_kernels.quantize(x, bits), reference.quantize(x, bits)
    for name, a, b in zip(("codes", "scales"), got, want, strict=True):
        assert torch.equal(a, b), name
    restored = mb_kernels.dequantize(*got, bits=bits, dtype=dtype)
    assert torch.equal(restored, reference.dequantize(*want, bits=bits, dtype=dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_nan_and_infinity_turn_their_group_into_nan(bits):
    x = torch.ones(2, 256)
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    restored = mb_kernels.dequantize(*mb_kernels.quantize(x, bits), bits=bits, dtype=x.dtype)
    assert restored[0, :128].isnan().all()
    assert restored[1, 128:].isnan().all()
    assert torch.equal(restored[0, 128:], x[0, 128:])
    assert torch.equal(restored[1, :128], x[1, :128])


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_of_fp32_stay_numbers(bits):
    x = torch.full((2, 128), torch.finfo(torch.float32).max)
    x[0, ::2] *= -1
    got = mb_kernels.quantize(x, bits)
    assert torch.equal(got.scales, reference.quantize(x, bits)[1])
    restored = mb_kernels.dequantize(*got, bits=bits, dtype=x.dtype)
    torch.testing.assert_close(restored, x, rtol=1e-6, atol=0)


@pytest.fixture(params=["sm80", "gfx942", "gfx950"])
def chip(request):
    """Of each format of 8-bit floats one, and one without any."""
    with assume(partial(plan_for, TARGETS[request.param], units=3, hopper=False)):
        yield TARGETS[request.param].float8 or torch.float8_e4m3fn


# A row of three blocks, and columns of three tiles.
IN_PARTS = [((3, 20_000), False), ((3, 300), True)]
SHAPES = itertools.product([(3, 128), (2, 5, 256), (7, 16), (2, 600, 33)], [False, True])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "transpose"), [*SHAPES, *IN_PARTS], ids=str)
def test_float8_is_equal_to_the_reference(shape, transpose, dtype, chip):
    x = (torch.randn(shape) * torch.logspace(-4, 3, shape[-1])).to(dtype)
    x[..., 0, :] = 0
    got, want = (m.to_float8(x, transpose=transpose) for m in (mb_kernels, reference))
    assert got[0].dtype is chip
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.usefixtures("chip")
def test_what_is_no_number_turns_its_row_of_float8_into_nan(transpose, value):
    x = torch.ones(150, 200)
    x[130, 140] = value
    codes, scales = mb_kernels.to_float8(x, transpose=transpose)
    restored = codes.float() * scales[:, None]
    row = 140 if transpose else 130
    assert restored[row].isnan().all()
    restored[row] = 1.0
    assert torch.equal(restored, torch.ones_like(restored))


def values(dtype):
    """Of each code of E4M3, NaN for no number: a sign, 4 bits of exponent, 3 of mantissa."""
    fnuz = dtype is torch.float8_e4m3fnuz
    bias, finite = (8, 240.0) if fnuz else (7, 448.0)
    found = []
    for sign, exponent, mantissa in itertools.product((1, -1), range(16), range(8)):
        steps = mantissa if exponent == 0 else 8 + mantissa
        value = sign * steps * 2.0 ** (max(exponent, 1) - bias - 3)
        no_number = (sign, steps) == (-1, 0) if fnuz else abs(value) > finite
        found.append(float("nan") if no_number else value)
    return torch.tensor(found)


@pytest.mark.parametrize("transpose", [False, True])
def test_each_number_becomes_the_code_nearest_to_it(transpose, chip):
    """Codes themselves, what lies halfway between two or a bit beside it, zeros; ties are even."""
    table = values(chip)
    torch_s = torch.arange(256, dtype=torch.uint8).view(chip).float()
    torch.testing.assert_close(table, torch_s, rtol=0, atol=0, equal_nan=True)
    numbers = table[table.isfinite()].sort().values
    halves = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(halves, torch.full_like(halves, to)) for to in (-1e9, 1e9)]
    few = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-40, -1e-40])
    x = torch.cat([numbers, halves, *beside, few])  # the scale of their largest is one
    given = x[:, None] if transpose else x[None]
    codes, (scale,) = mb_kernels.to_float8(given, transpose=transpose)
    assert scale == 1
    got = codes.view(torch.uint8).flatten().long()
    distance = (table[None].double() - x[:, None].double()).abs().nan_to_num(torch.inf)
    nearest = distance == distance.amin(1, keepdim=True)
    assert nearest.gather(1, got[:, None]).all()
    tie = nearest[:, :128].sum(1) + nearest[:, 129:].sum(1) > 1  # +0 and -0 are one number
    assert (got[tie] % 2 == 0).all()
    assert tie.sum() > 200
