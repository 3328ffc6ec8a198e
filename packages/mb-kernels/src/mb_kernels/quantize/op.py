"""Saved activations in 4 or 8 bits: half or a quarter of bf16's bytes between forward and backward.

Columns are taken in groups of 128 along the last dimension; a group shares one fp32 scale, its
largest magnitude divided by the largest code (127 or 7). Rounding to the nearest code bounds the
error of every element of a group g by

    |x - dequantize(quantize(x))|  <=  max|x_g| / 254   (8 bits)      max|x_g| / 14   (4 bits)

up to rounding to the output dtype, and zero stays zero. A group that holds an infinity or a NaN
comes back as NaN entirely, so a loss scaler still sees an overflow. Neither function has a
gradient: they are for tensors an autograd formula keeps. The idea is that of ActNN
(arXiv:2104.14129) with deterministic rounding.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mb_kernels.quantize.reference import GROUP_SIZE as GROUP_SIZE
from mb_kernels.quantize.reference import dequantize as dequantize_reference
from mb_kernels.quantize.reference import empty_quantized
from mb_kernels.quantize.reference import quantize as quantize_reference
from mb_kernels.runtime import checks, registration


class Quantized(NamedTuple):
    """A tensor in codes and scales."""

    codes: Tensor
    """[..., C] int8, or [..., C / 2] uint8 with two 4-bit codes in a byte, even column low."""
    scales: Tensor
    """[..., ceil(C / 128)] fp32."""


def quantize(x: Tensor, bits: int) -> Quantized:
    """Round ``x`` [..., C] to codes of 4 or 8 bits with one scale per 128 columns.

    Args:
        x: fp32, bf16 or fp16; C even for 4 bits.
        bits: 4 or 8.

    Returns:
        Codes and scales, for ``dequantize``. Not differentiable.

    Raises:
        ValueError: another number of bits, an odd C with 4 bits, no dimension, not floating point.
    """
    _check_bits(bits)
    checks.require_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x: expected [..., C], one dimension at least; got ().")
    if bits == 4 and x.shape[-1] % 2:
        raise ValueError(
            f"x: expected an even last dimension, two 4-bit codes fill a byte; got "
            f"{x.shape[-1]}. Use bits=8 or pad."
        )
    return Quantized(*torch.ops.mb.quantize(x.detach(), bits))


def dequantize(codes: Tensor, scales: Tensor, *, bits: int, dtype: torch.dtype) -> Tensor:
    """What ``quantize`` stands for: ``dequantize(*quantize(x, 8), bits=8, dtype=x.dtype)``.

    Args:
        codes, scales: what ``quantize`` returned.
        bits: what it was called with.
        dtype: of the result: fp32, bf16, fp16 or fp64.

    Returns:
        [..., C], as x was. Not differentiable.

    Raises:
        ValueError: ``bits`` or shapes are not those of one ``quantize`` call.
    """
    _check_bits(bits)
    checks.require_dense("codes", codes)
    checks.require_dense("scales", scales)
    code_dtype = torch.int8 if bits == 8 else torch.uint8
    if codes.dtype is not code_dtype or dtype not in checks.DTYPES:
        raise ValueError(
            f"codes: expected {code_dtype} for {bits} bits and float32, bfloat16, float16 or "
            "float64 to return; "
            f"got {codes.dtype} and {dtype}. Pass the bits that quantize was given."
        )
    if codes.ndim == 0:
        raise ValueError("codes: expected one dimension at least, as quantize returns; got ().")
    columns = codes.shape[-1] * (8 // bits)
    expected = (*codes.shape[:-1], -(-columns // GROUP_SIZE))
    checks.require_device("codes", codes, scales=scales)
    if scales.dtype is not torch.float32:
        raise ValueError(f"scales: expected float32, as quantize returns them; got {scales.dtype}.")
    if scales.shape != expected:
        raise ValueError(
            f"scales: expected {expected}, one per {GROUP_SIZE} columns of {columns}; got "
            f"{tuple(scales.shape)}. Pass codes and scales of the same quantize call."
        )
    return torch.ops.mb.dequantize(codes, scales.detach(), bits, dtype)


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or bits not in (4, 8):  # 8.0 equals 8, but ops take integers
        raise ValueError(f"bits: expected 4 or 8; got {bits!r} of type {type(bits).__name__}.")


registration.register(
    "quantize(Tensor x, int bits) -> (Tensor, Tensor)",
    reference=quantize_reference,
    kernels="mb_kernels.quantize.kernels",
    fake=empty_quantized,
)
registration.register(
    "dequantize(Tensor codes, Tensor scales, int bits, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    kernels="mb_kernels.quantize.kernels",
    fake=lambda codes, scales, bits, dtype: codes.new_empty(
        (*codes.shape[:-1], codes.shape[-1] * (8 // bits)), dtype=dtype
    ),
)
