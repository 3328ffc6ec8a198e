"""The product of ``mb_kernels.float8_linear`` on a GPU: our codes, torch's product of codes.

Letters: N rows, K contraction, M columns of the product.
"""

import torch.nn.functional as functions
from torch import Tensor

from mb_kernels.float8.kernels import to_float8
from mb_kernels.float8.reference import scaled_product

_ROW_WISE = functions.ScalingType.RowWise


def float8_product(x: Tensor, w: Tensor, transpose_weight: bool) -> Tensor:
    """[N, M]: x [N, K] times w [M, K] transposed, or without ``transpose_weight`` w [K, M]."""
    codes, scales = to_float8(x)
    weights, columns = to_float8(w, transpose=not transpose_weight)
    if x.shape[0] == 0 or w.numel() == 0:
        return x.new_zeros((x.shape[0], weights.shape[0]))
    if not x.is_cuda:  # interpreted, or a rehearsal
        return scaled_product(codes, scales, weights, columns, x.dtype)
    return functions.scaled_mm(
        *(codes, weights.mT),
        scale_a=scales[:, None],
        scale_recipe_a=_ROW_WISE,
        scale_b=columns[None, :],
        scale_recipe_b=_ROW_WISE,
        output_dtype=x.dtype,
        use_fast_accum=True,  # as the kernels of the experts add: 0.2% of a result's norm
    )
