"""Reference of ``mb_kernels.to_float8`` and of products of what it returns.

Letters: R rows, C columns (all leading dims), N rows, K contraction, M output columns, E experts.
"""

import torch
from torch import Tensor

from mb_kernels.grouped_gemm.reference import grouped_gemm
from mb_kernels.runtime.precision import wide

LARGEST = 448.0
"""The largest number of torch.float8_e4m3fn."""
SMALLEST = 1e-30
"""The least that a row's largest magnitude is taken for: what is below it becomes zero."""


def to_float8(x: Tensor, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Twin of ``mb_kernels.to_float8``."""
    x_RC = wide(x.mT if transpose else x)
    if x_RC.shape[-1] == 0:
        return x_RC.to(torch.float8_e4m3fn), x_RC.new_ones(x_RC.shape[:-1], dtype=torch.float32)
    largest_R = x_RC.abs().amax(dim=-1).clamp_min(SMALLEST)  # NaN if the row holds one
    # Divided, where 448 / m would be 1 / m, rounded, times 448: products may lie between two codes.
    inverse_R = torch.div(torch.full_like(largest_R, LARGEST), largest_R)
    codes = (x_RC * inverse_R[..., None]).to(torch.float8_e4m3fn)
    return codes.contiguous(), (largest_R / LARGEST).float()


def float8_grouped_gemm(
    x_NK: Tensor, w: Tensor, offsets_E1: Tensor, *, transpose_weight: bool = True
) -> Tensor:
    """``grouped_gemm`` of what ``to_float8`` makes of x [N, K] and w, in the dtype of x."""
    codes_NK, scales_N = to_float8(x_NK)
    codes_EMK, scales_EM = to_float8(w, transpose=not transpose_weight)
    kind = wide(x_NK).dtype
    y_NM = grouped_gemm(codes_NK.to(kind), codes_EMK.to(kind), offsets_E1)
    counts_E = offsets_E1.diff().long()
    scales_RM = scales_EM.repeat_interleave(counts_E, dim=0).to(kind)
    y_NM[: scales_RM.shape[0]] *= scales_N[: scales_RM.shape[0], None].to(kind) * scales_RM
    return y_NM.to(x_NK.dtype)


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
