"""Reference of ``mb_kernels.to_float8``, and of products of what it returns.

Letters: R rows (all leading dims), C columns; N rows, K contraction, M columns of a product.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mb_kernels.derivatives import once_differentiable
from mb_kernels.runtime.plan import plan_of
from mb_kernels.runtime.precision import wide

SMALLEST = 1e-30
"""The least that a row's largest magnitude is taken for: what is below it becomes zero."""


def to_float8(x: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Twin of ``mb_kernels.to_float8``."""
    kind, x_RC = plan_of(x).codes, wide(x.mT if transpose else x)
    if x_RC.shape[-1] == 0:
        return x_RC.to(kind), x_RC.new_ones(x_RC.shape[:-1], dtype=torch.float32)
    largest_R = x_RC.abs().amax(dim=-1).clamp_min(SMALLEST)  # NaN if the row holds one
    largest_R = torch.where(largest_R.isfinite(), largest_R, torch.nan)
    # Tensors, because torch divides by a number, or a number, by way of a rounded reciprocal.
    most_R = torch.full_like(largest_R, torch.finfo(kind).max)
    codes = (x_RC * (most_R / largest_R)[..., None]).to(kind)
    return codes.contiguous(), (largest_R / most_R).float()


def float8_product(x_NK: Tensor, w: Tensor, transpose_weight: bool) -> Tensor:
    """x times w [M, K] transposed, or without ``transpose_weight`` w [K, M], of their codes."""
    weights = to_float8(w, transpose=not transpose_weight)
    return scaled_product(*to_float8(x_NK), *weights, x_NK.dtype)


def scaled_product(
    codes_NK: Tensor, scales_N: Tensor, codes_MK: Tensor, scales_M: Tensor, dtype: torch.dtype
) -> Tensor:
    """[N, M] in ``dtype``: the product of two matrices in codes and scales."""
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    y_NM = codes_NK.to(kind) @ codes_MK.to(kind).mT
    return (y_NM * (scales_N[:, None] * scales_M).to(kind)).to(dtype)


def float8_linear(x_NK: Tensor, w_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Twin of ``mb_kernels.float8_linear``."""
    outputs, inputs = w_MK.shape
    x = x_NK.reshape(math.prod(x_NK.shape[:-1]), inputs)
    y = _Linear.apply(x, w_MK).view(*x_NK.shape[:-1], outputs)
    return y if bias_M is None else y + bias_M


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, w_MK: Tensor) -> Tensor:
        ctx.save_for_backward(x_NK, w_MK)
        return float8_product(x_NK, w_MK, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NM: Tensor) -> tuple[Tensor, Tensor]:
        x_NK, w_MK = ctx.saved_tensors
        return float8_product(dy_NM, w_MK, False), dy_NM.mT @ x_NK
