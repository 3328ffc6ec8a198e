"""Reference of ``mb_kernels.grouped_gemm``: one matrix product per expert, in a loop.

Letters: N rows, K contraction, M output columns, E experts, E1 = E + 1.
"""

import itertools

import torch
from torch import Tensor

from mb_kernels.bins import offsets_list


def grouped_gemm(
    x_NK: Tensor, w_EMK: Tensor, offsets_E1: Tensor, *, transpose_weight: bool = True
) -> Tensor:
    """Twin of ``mb_kernels.grouped_gemm``, differentiable by plain autograd."""
    w_EKM = w_EMK.transpose(1, 2) if transpose_weight else w_EMK
    offsets = offsets_list(offsets_E1, x_NK.shape[0])
    parts = [
        x_NK[start:end] @ w_EKM[e] for e, (start, end) in enumerate(itertools.pairwise(offsets))
    ]
    parts.append(x_NK.new_zeros(x_NK.shape[0] - offsets[-1], w_EKM.shape[2]))
    return torch.cat(parts)


def grouped_outer(a_NM: Tensor, b_NK: Tensor, offsets_E1: Tensor) -> Tensor:
    """Per expert ``a_e^T @ b_e`` over that expert's rows: [E, M, K], zeros for an empty expert."""
    offsets = offsets_list(offsets_E1, a_NM.shape[0])
    out_EMK = a_NM.new_zeros(len(offsets) - 1, a_NM.shape[1], b_NK.shape[1])
    for e, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end > start:
            out_EMK[e] = a_NM[start:end].T @ b_NK[start:end]
    return out_EMK


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False, *, trans_a: bool = False
) -> Tensor:
    """Twin of ``mb_kernels.gmm``, differentiable by plain autograd."""
    offsets_E1 = torch.nn.functional.pad(batch_sizes.cumsum(0), (1, 0))
    if trans_a:
        products = [a.new_zeros(0, a.shape[1], b.shape[1])]  # of no expert
        for start, end in itertools.pairwise(offsets_E1.tolist()):
            products.append((a[start:end].T @ b[start:end])[None])
        return torch.cat(products)
    return grouped_gemm(a, b, offsets_E1, transpose_weight=trans_b)
