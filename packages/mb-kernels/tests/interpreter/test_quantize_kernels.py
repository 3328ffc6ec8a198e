"""The kernels of codes and scales in Triton's interpreter, bit for bit the reference."""

import mb_kernels
import pytest
import torch
from mb_kernels import reference


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    "shape", [(3, 128), (2, 5, 256), (7, 16), (2, 600, 33), (3, 20_000)], ids=str
)
def test_float8_is_equal_to_the_reference(shape, transpose, dtype):
    x = (torch.randn(shape) * torch.logspace(-4, 3, shape[-1])).to(dtype)
    x[..., 0, :] = 0
    got, want = (m.to_float8(x, transpose=transpose) for m in (mb_kernels, reference))
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_what_is_no_number_turns_its_row_of_float8_into_nan(transpose, value):
    x = torch.ones(150, 200)
    x[130, 140] = value
    codes, scales = mb_kernels.to_float8(x, transpose=transpose)
    restored = codes.float() * scales[:, None]
    row = 140 if transpose else 130
    assert restored[row].isnan().all()
    restored[row] = 1.0
    assert torch.equal(restored, torch.ones_like(restored))
