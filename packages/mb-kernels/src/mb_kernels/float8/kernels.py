"""Triton kernels of ``mb_kernels.to_float8``: the largest of a row is found first, then its codes.

A row is read once, if it fits into registers. Columns take two passes over the matrix: in a program
for some whole columns the lines that it reads, and those that it writes, would be short.

Letters: B matrices, R rows, C columns of one matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.float8.reference import SMALLEST
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import plan_of

# Elements of one block: 32 for each of 256 threads, four 16-byte loads on their way.
_BLOCK = 8192
_WARPS = 8
# Of columns: tiles of 128 x 128, whole lines of codes; the maxima of so many below each other.
_SIDE = 128
_STEPS = 4


@triton.jit
def _scale(largest, bad, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """(scale, what to multiply by) of rows whose largest magnitude is ``largest``.

    A maximum may skip NaN: ``bad`` is NaN where a row holds one or an infinity, else zero.
    """
    largest = tl.maximum(largest, SMALLEST) + bad
    most = tl.full(largest.shape, LARGEST, tl.float32)
    return tl.div_rn(largest, most), tl.div_rn(most, largest)


@triton.jit
def _place(R: tl.constexpr, C: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of this program: the matrix, the first of HEIGHT rows, the columns."""
    DOWN: tl.constexpr = (R + HEIGHT - 1) // HEIGHT
    ACROSS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tile = tl.program_id(0)
    column = tile % ACROSS * BLOCK_C
    first = tile // ACROSS % DOWN * HEIGHT
    return (tile // (ACROSS * DOWN)).to(tl.int64), first, column + tl.arange(0, BLOCK_C)


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
    x_row = x_ptr + r.to(tl.int64)[:, None] * C
    codes_row = codes_ptr + r.to(tl.int64)[:, None] * C
    live = (r < R)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    if C <= BLOCK_C:
        x = tl.load(x_row + c, mask=live & (c < C), other=0.0).to(tl.float32)
        scale, inverse = _scale(tl.max(tl.abs(x), 1), tl.sum(x - x, 1), LARGEST, SMALLEST)
        codes = (x * inverse[:, None]).to(codes_ptr.dtype.element_ty)
        tl.store(codes_row + c, codes, mask=live & (c < C))
    else:
        largest = tl.zeros((BLOCK_R,), tl.float32)
        bad = tl.zeros((BLOCK_R,), tl.float32)
        for start in range(0, C, BLOCK_C):
            inside = live & (start + c < C)
            x = tl.load(x_row + start + c, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
            bad += tl.sum(x - x, 1)
        scale, inverse = _scale(largest, bad, LARGEST, SMALLEST)
        for start in range(0, C, BLOCK_C):
            inside = live & (start + c < C)
            x = tl.load(x_row + start + c, mask=inside, other=0.0).to(tl.float32)
            codes = (x * inverse[:, None]).to(codes_ptr.dtype.element_ty)
            tl.store(codes_row + start + c, codes, mask=inside)
    tl.store(scales_ptr + r, scale, mask=r < R)


@triton.jit
def float8_maxima_kernel(
    x_ptr,  # [B, R, C]
    maxima_ptr,  # [B, C] int32, zeros: gets the bits of the largest magnitudes, in fp32
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    HEIGHT: tl.constexpr = BLOCK_R * STEPS
    matrix, first, c = _place(R, C, HEIGHT, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    x_ptr += matrix * (R * C)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for i in range(STEPS):
        row = first + i * BLOCK_R + r
        inside = (row < R)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + row[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        # As integers the bits have the order of the numbers, and NaN is above all.
        largest = tl.maximum(largest, tl.abs(x).to(tl.int32, bitcast=True))
    tl.atomic_max(maxima_ptr + matrix * C + c, tl.max(largest, 0), mask=c < C)


@triton.jit
def float8_columns_kernel(
    x_ptr,  # [B, R, C]
    maxima_ptr,  # [B, C], see float8_maxima_kernel
    codes_ptr,  # [B, C, R]
    scales_ptr,  # [B, C]
    R: tl.constexpr,
    C: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    matrix, first, c = _place(R, C, BLOCK_R, BLOCK_C)
    row = first + tl.arange(0, BLOCK_R)
    bits = tl.load(maxima_ptr + matrix * C + c, mask=c < C, other=0)
    largest = bits.to(tl.float32, bitcast=True)
    scale, inverse = _scale(largest, largest - largest, LARGEST, SMALLEST)
    if first == 0:
        tl.store(scales_ptr + matrix * C + c, scale, mask=c < C)
    inside = (row < R)[:, None] & (c < C)[None, :]
    at = x_ptr + matrix * (R * C) + row[:, None] * C + c[None, :]
    codes = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse[None, :]
    codes = tl.trans(codes.to(codes_ptr.dtype.element_ty))
    at = codes_ptr + matrix * (R * C) + c[:, None] * R + row[None, :]
    tl.store(at, codes, mask=(c < C)[:, None] & (row < R)[None, :])


def to_float8(x: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Launch for x [..., R, C] contiguous."""
    shape = (x.mT if transpose else x).shape
    codes = x.new_empty(shape, dtype=plan_of(x).codes)
    scales = x.new_empty(shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return codes, scales.fill_(1.0)
    if transpose:
        _columns(x.view(-1, *x.shape[-2:]), codes, scales)
    else:
        _rows(x, codes, scales)
    return codes, scales


def _rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Codes and scales of the rows of x [..., C]."""
    rows, columns = scales.numel(), x.shape[-1]
    block_c = min(power_of_two(columns), _BLOCK)
    block_r = _BLOCK // block_c
    launch(
        float8_rows_kernel,
        (cdiv(rows, block_r),),
        *(x, codes, scales, rows),
        C=columns,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=_WARPS,
        **_numbers(codes),
    )


def _columns(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Codes and scales of the columns of x [B, R, C]."""
    count, rows, columns = x.shape
    maxima = torch.zeros_like(scales, dtype=torch.int32)
    across = count * cdiv(columns, _SIDE)
    sizes = {"R": rows, "C": columns, "BLOCK_R": _SIDE, "BLOCK_C": _SIDE, "num_warps": _WARPS}
    grid = (across * cdiv(rows, _SIDE * _STEPS),)
    launch(float8_maxima_kernel, grid, x, maxima, **sizes, STEPS=_STEPS)
    grid = (across * cdiv(rows, _SIDE),)
    launch(float8_columns_kernel, grid, x, maxima, codes, scales, **sizes, **_numbers(codes))


def _numbers(codes: Tensor) -> dict[str, float]:
    """The constants of ``_scale``."""
    return {"LARGEST": torch.finfo(codes.dtype).max, "SMALLEST": SMALLEST}
