"""Twin of ``mb_kernels.symmetric_matmul``."""

import torch
from torch import Tensor


def symmetric_matmul(
    a_BMK: Tensor,
    b_BMK: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
) -> Tensor:
    """Twin of ``mb_kernels.symmetric_matmul``."""
    start = a_BMK.new_zeros(()) if add_BMM is None else add_BMM
    beta = 0.0 if add_BMM is None else beta
    product = torch.baddbmm(start, a_BMK, b_BMK.mT, alpha=alpha, beta=beta)
    if diagonal:
        product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product
