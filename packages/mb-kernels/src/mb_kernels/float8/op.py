"""Matrices in 8-bit floats, for products that take half the time of bf16's.

E4M3 has four significant bits. There are two such formats: OCP's, with numbers up to 448, and that
of AMD's MI300, up to 240. A tensor is rounded to the one that its device multiplies, on a CPU to
OCP's (``mb_kernels.targets.Target.float8`` is a chip's).

A scale for each row of the left operand and for each output channel of the right one can be taken
out of the sum, so the product of two such matrices is a plain product of their codes, whose results
are scaled. This is torchao's "rowwise" recipe.

Letters: R rows, C columns (all leading dims).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mb_kernels.float8.reference import to_float8 as to_float8_reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.plan import plan_of


class Float8(NamedTuple):
    """A matrix in codes and scales: row r is ``codes[..., r, :] * scales[..., r]``."""

    codes: Tensor
    """[..., R, C] torch.float8_e4m3fn, or on an MI300 torch.float8_e4m3fnuz."""
    scales: Tensor
    """[..., R] fp32."""


def to_float8(x: Tensor, *, transpose: bool = False) -> Float8:
    """Round ``x`` [..., R, C] to 8-bit floats, the largest of each row to their largest.

    An element z of a row whose largest magnitude is m changes by at most max(|z| / 16, m / 2**18),
    with 1e-30 for an m below that, whose row becomes smaller codes and soon zeros.
    Rows that hold an infinity or a NaN come back as NaN, so that a loss scaler still sees them.

    Args:
        x: fp32, bf16 or fp16.
        transpose: return ``to_float8(x.mT)``, codes [..., C, R] and scales [..., C], without a
            transposed copy of x.

    Returns:
        Codes and scales. Not differentiable.

    Raises:
        ValueError: fewer than two dimensions, not floating point, a GPU without 8-bit floats; on a
            GPU, with ``transpose``, matrices of 2**31 elements, or 2**24 rows or columns.
    """
    checks.require_floating("x", x)
    checks.require_float8_codes(x)
    if x.ndim < 2:
        raise ValueError(f"x: expected [..., R, C]; got {tuple(x.shape)}.")
    if transpose:
        checks.require_addressable("x", x, x.shape)
    return Float8(*torch.ops.mb.to_float8(x.detach(), transpose))


def _fake(x: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
    shape = (x.mT if transpose else x).shape
    codes = x.new_empty(shape, dtype=plan_of(x).codes)
    return codes, x.new_empty(shape[:-1], dtype=torch.float32)


registration.register(
    "to_float8(Tensor x, bool transpose) -> (Tensor, Tensor)",
    reference=to_float8_reference,
    kernels="mb_kernels.float8.kernels",
    fake=_fake,
)
