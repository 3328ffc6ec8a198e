"""Triton kernels of ``mb_kernels.to_float8``: one pass for the largest of a row, one for its codes.

The second pass finds in L2, or in registers, what the first has read.

Letters: B matrices, R rows, C columns of one matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.float8.reference import LARGEST, SMALLEST
from mb_kernels.runtime.launch import cdiv, launch, power_of_two

# Elements of one block: 32 for each of 256 threads, four 16-byte loads on their way.
_BLOCK = 8192
_WARPS = 8


@triton.jit
def _scale(largest, bad, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """(scale, what to multiply by) of rows whose largest magnitude is ``largest``.

    A maximum may skip NaN: ``bad`` is NaN for a row that holds one or an infinity, else zero.
    """
    largest = tl.maximum(largest, SMALLEST) + bad
    most = tl.full(largest.shape, LARGEST, tl.float32)
    return tl.div_rn(largest, most), tl.div_rn(most, largest)


@triton.jit
def float8_rows_kernel(
    x_ptr,  # [R, C]
    codes_ptr,  # [R, C]
    scales_ptr,  # [R]
    R,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.arange(0, BLOCK_C)
    row = r.to(tl.int64)[:, None] * C
    largest = tl.zeros((BLOCK_R,), tl.float32)
    bad = tl.zeros((BLOCK_R,), tl.float32)
    x = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in tl.static_range(0, C, BLOCK_C):
        inside = (r < R)[:, None] & (start + c < C)[None, :]
        x = tl.load(x_ptr + row + (start + c)[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        bad += tl.sum(x - x, 1)
    scale, inverse = _scale(largest, bad, LARGEST, SMALLEST)
    tl.store(scales_ptr + r, scale, mask=r < R)
    for start in tl.static_range(0, C, BLOCK_C):
        inside = (r < R)[:, None] & (start + c < C)[None, :]
        if C > BLOCK_C:
            x = tl.load(x_ptr + row + (start + c)[None, :], mask=inside, other=0.0).to(tl.float32)
        codes = (x * inverse[:, None]).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row + (start + c)[None, :], codes, mask=inside)


@triton.jit
def float8_columns_kernel(
    x_ptr,  # [B, R, C]
    codes_ptr,  # [B, C, R]
    scales_ptr,  # [B, C]
    R: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    matrix = (tl.program_id(0) // TILES).to(tl.int64)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    x_ptr += matrix * (R * C)
    codes_ptr += matrix * (R * C)
    largest = tl.zeros((BLOCK_C,), tl.float32)
    bad = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, R, BLOCK_R):
        inside = (start + r < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + (start + r)[:, None] * C + c[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 0))
        bad += tl.sum(x - x, 0)
    scale, inverse = _scale(largest, bad, LARGEST, SMALLEST)
    tl.store(scales_ptr + matrix * C + c, scale, mask=c < C)
    for start in range(0, R, BLOCK_R):
        inside = (start + r < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + (start + r)[:, None] * C + c[None, :], mask=inside, other=0.0)
        codes = (x.to(tl.float32) * inverse[None, :]).to(codes_ptr.dtype.element_ty)
        inside = (c < C)[:, None] & (start + r < R)[None, :]
        tl.store(codes_ptr + c[:, None] * R + (start + r)[None, :], tl.trans(codes), mask=inside)


def to_float8(x: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Launch for x [..., R, C] contiguous."""
    *leading, columns = x.shape
    if transpose:
        *leading, rows = leading
        shape = (*leading, columns, rows)
    else:
        rows = x.numel() // max(columns, 1)
        shape = x.shape
    codes = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return codes, scales.fill_(1.0)
    numbers = {"LARGEST": LARGEST, "SMALLEST": SMALLEST, "num_warps": _WARPS}
    if transpose:
        grid = (x.numel() // (rows * columns) * cdiv(columns, 64),)
        sizes = {"R": rows, "C": columns, "BLOCK_R": 128, "BLOCK_C": 64}
        launch(float8_columns_kernel, grid, x, codes, scales, **sizes, **numbers)
    else:
        block_c = min(power_of_two(columns), _BLOCK)
        block_r = _BLOCK // block_c
        sizes = {"C": columns, "BLOCK_R": block_r, "BLOCK_C": block_c}
        grid = (cdiv(rows, block_r),)
        launch(float8_rows_kernel, grid, x, codes, scales, rows, **sizes, **numbers)
    return codes, scales
