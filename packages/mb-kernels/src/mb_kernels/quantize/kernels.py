"""Triton kernels of ``mb_kernels.quantize``: one program takes BLOCK_R rows of one group.

Letters: R rows (all leading dims), C columns, G groups of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.quantize.reference import (
    GROUP_SIZE,
    empty_quantized,
    largest_code,
    largest_scale,
)
from mb_kernels.runtime.launch import cdiv, launch

# 4096 elements, 32 per thread of 4 warps: eight 16-byte loads in flight each.
_BLOCK_R = 32


@triton.jit
def _round_to_even(x):
    # Adding 1.5 · 2^23 leaves no fraction bits: the addition itself rounds to nearest even, as
    # torch.round does. Exact below 2^22; codes are below 128.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    R,
    C: tl.constexpr,
    BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    LARGEST_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # One dimension of programs: the others end at 65535, and groups may be more.
    groups: tl.constexpr = (C + GROUP - 1) // GROUP
    group = tl.program_id(0) % groups
    rows = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = group * GROUP + tl.arange(0, GROUP)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    x = tl.load(x_ptr + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)  # [BLOCK_R, GROUP]
    largest = tl.max(tl.abs(x), axis=1)
    # A maximum may skip NaN; x - x is NaN for infinities and NaN, zero for all else.
    scales = tl.div_rn(largest, tl.full((BLOCK_R,), LARGEST, tl.float32))
    scales = tl.minimum(scales, LARGEST_SCALE) + tl.sum(x - x, axis=1)
    divisors = tl.where(scales > 0, scales, 1.0)
    codes = _round_to_even(tl.div_rn(x, tl.broadcast_to(divisors[:, None], x.shape)))
    codes = tl.where((scales > 0)[:, None], codes, 0.0)
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST).to(tl.int32)
    tl.store(scales_ptr + rows * groups + group, scales, mask=rows < R)
    if BITS == 8:
        tl.store(codes_ptr + rows[:, None] * C + columns[None, :], codes.to(tl.int8), mask=inside)
    else:
        even, odd = tl.split(tl.reshape(codes + 8, (BLOCK_R, GROUP // 2, 2)))
        packed = (even | (odd << 4)).to(tl.uint8)
        bytes_ = group * (GROUP // 2) + tl.arange(0, GROUP // 2)
        inside = (rows < R)[:, None] & (bytes_ < C // 2)[None, :]
        tl.store(codes_ptr + rows[:, None] * (C // 2) + bytes_[None, :], packed, mask=inside)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    R,
    C: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    groups: tl.constexpr = (C + GROUP - 1) // GROUP
    group = tl.program_id(0) % groups
    rows = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = group * GROUP + tl.arange(0, GROUP)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    scales = tl.load(scales_ptr + rows * groups + group, mask=rows < R, other=0.0)
    if BITS == 8:
        codes = tl.load(codes_ptr + rows[:, None] * C + columns[None, :], mask=inside, other=0)
        codes = codes.to(tl.float32)
    else:
        bytes_ = group * (GROUP // 2) + tl.arange(0, GROUP // 2)
        packed_inside = (rows < R)[:, None] & (bytes_ < C // 2)[None, :]
        packed = tl.load(
            codes_ptr + rows[:, None] * (C // 2) + bytes_[None, :], mask=packed_inside, other=0
        ).to(tl.int32)
        codes = tl.join((packed & 15) - 8, (packed >> 4) - 8).reshape(BLOCK_R, GROUP)
        codes = codes.to(tl.float32)
    x = codes * scales[:, None]
    x = x.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + rows[:, None] * C + columns[None, :], x, mask=inside)


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Launch for x [..., C] contiguous."""
    codes, scales = empty_quantized(x, bits)
    if x.numel():
        columns = x.shape[-1]
        rows = x.numel() // columns
        largest = {"LARGEST": largest_code(bits), "LARGEST_SCALE": largest_scale(bits)}
        sizes = {**_sizes(bits, columns), **largest}
        grid = (cdiv(rows, _BLOCK_R) * scales.shape[-1],)
        launch(quantize_kernel, grid, x, codes, scales, rows, **sizes)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Launch for contiguous codes and scales of ``quantize``."""
    columns = codes.shape[-1] * (8 // bits)
    x = codes.new_empty((*codes.shape[:-1], columns), dtype=dtype)
    if x.numel():
        rows = x.numel() // columns
        grid = (cdiv(rows, _BLOCK_R) * scales.shape[-1],)
        launch(dequantize_kernel, grid, codes, scales, x, rows, **_sizes(bits, columns))
    return x


def _sizes(bits: int, columns: int) -> dict[str, Any]:
    return {"C": columns, "BITS": bits, "GROUP": GROUP_SIZE, "BLOCK_R": _BLOCK_R}
