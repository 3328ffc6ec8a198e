"""The quantisation kernels in Triton's interpreter, bit for bit the reference."""

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
