"""Products of matrices that are known to be symmetric: half of the tiles, each stored twice.

A Gram matrix ``x x^T`` is one, and so is any product of matrices that commute and are symmetric, as
the polynomials of a Gram matrix are: the products of Muon's orthogonalisation. The FLOPs are 0.58
times those of a general product at six tiles a side, and half in the limit.

Letters: B matrices, M rows, K columns.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.runtime import checks, registration
from mb_kernels.symmetric_matmul import reference


@torch.no_grad()
def symmetric_matmul(
    a_BMK: Tensor,
    b_BMK: Tensor,
    add_BMM: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
) -> Tensor:
    """``alpha a b^T + beta add + diagonal I`` for each pair of matrices whose product is symmetric.

    The caller vouches that ``a b^T`` and ``add`` are symmetric but for rounding: on a GPU what lies
    above the tiles on the diagonal is a copy of what lies below. Nothing is differentiated.

    Args:
        a_BMK: [B, M, K], fp32, bf16, fp16 or fp64. Read in place if its rows, or its columns
            (``x.mT`` of a contiguous x), lie one behind the other; else copied.
        b_BMK: as a.
        add_BMM: [B, M, M] of their dtype, or None.
        alpha, beta: of the product and of ``add_BMM``, which is not read where beta is 0.
        diagonal: added to the diagonal.

    Returns:
        [B, M, M] in their dtype, contiguous; sums are fp32, and so are those of 16-bit numbers.

    Raises:
        ValueError: shapes, dtypes or devices that do not match.
    """
    others = {"b_BMK": b_BMK} if add_BMM is None else {"b_BMK": b_BMK, "add_BMM": add_BMM}
    checks.require_same("a_BMK", a_BMK, **others)
    if a_BMK.ndim != 3 or b_BMK.shape != a_BMK.shape:
        raise ValueError(
            "a_BMK, b_BMK: expected two stacks of matrices of one shape, [B, M, K]; got "
            f"{tuple(a_BMK.shape)} and {tuple(b_BMK.shape)}."
        )
    if add_BMM is not None and add_BMM.shape != (*a_BMK.shape[:2], a_BMK.shape[1]):
        raise ValueError(
            f"add_BMM: expected {(*a_BMK.shape[:2], a_BMK.shape[1])}; got {tuple(add_BMM.shape)}."
        )
    return torch.ops.mb.symmetric_matmul(
        a_BMK, b_BMK, add_BMM if beta else None, float(alpha), float(beta), float(diagonal)
    )


def _reference(
    a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float, diagonal: float
) -> Tensor:
    return reference.symmetric_matmul(a, b, add, alpha=alpha, beta=beta, diagonal=diagonal)


def _flops(a_shape: Any, *_: Any, **__: Any) -> int:
    count, size, depth = a_shape
    return count * size * (size + 1) * depth


registration.register(
    "symmetric_matmul(Tensor a, Tensor b, Tensor? add, float alpha, float beta, float diagonal) "
    "-> Tensor",
    reference=_reference,
    fake=lambda a, *_: a.new_empty((*a.shape[:2], a.shape[1])),
    kernels="mb_kernels.symmetric_matmul.kernels",
    flops=_flops,
    strided=True,
)
