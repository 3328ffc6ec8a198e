"""Reference of ``mb_kernels.permute``: tokens to rows sorted by expert, and back.

Letters: T tokens, D hidden, K top-k, N = T·K rows.
"""

import torch
from torch import Tensor

from mb_kernels.bins import Bins
from mb_kernels.runtime.precision import wide_dtype


def gather(x_TD: Tensor, bins: Bins, top_k: int) -> Tensor:
    """Twin of ``mb_kernels.gather``, differentiable by plain autograd."""
    rows_ND = x_TD[bins.order_N.long().clamp(min=0) // top_k]
    return torch.where(_taken(bins)[:, None], rows_ND, 0)


def combine(rows_ND: Tensor, bins: Bins, weights_TK: Tensor | None, top_k: int = 0) -> Tensor:
    """Twin of ``mb_kernels.combine``; ``weights_TK=None`` with ``top_k`` sums unweighted."""
    k = top_k if weights_TK is None else weights_TK.shape[1]
    inverse_TK = bins.inverse_N.view(-1, k).long()
    accumulator = wide_dtype(rows_ND)
    y_TD = torch.zeros(
        inverse_TK.shape[0], rows_ND.shape[1], dtype=accumulator, device=rows_ND.device
    )
    for choice in range(k):
        row_T = inverse_TK[:, choice]
        term_TD = rows_ND[row_T.clamp(min=0)].to(accumulator)
        if weights_TK is not None:
            term_TD = term_TD * weights_TK[:, choice, None].to(accumulator)
        y_TD = y_TD + torch.where((row_T >= 0)[:, None], term_TD, 0)
    return y_TD.to(rows_ND.dtype)


def combine_backward(
    dy_TD: Tensor, rows_ND: Tensor, bins: Bins, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``combine`` for rows_ND and weights_TK."""
    top_k = weights_TK.shape[1]
    taken_N1 = _taken(bins)[:, None]
    order_N = bins.order_N.long().clamp(min=0)
    accumulator = wide_dtype(rows_ND)
    dy_ND = torch.where(taken_N1, dy_TD[order_N // top_k].to(accumulator), 0)
    d_rows_ND = dy_ND * weights_TK.flatten()[order_N, None].to(accumulator)
    d_rows_ND = torch.where(taken_N1, d_rows_ND, 0).to(rows_ND.dtype)
    d_weights_N = torch.zeros_like(weights_TK).flatten()
    dots_N = (dy_ND * torch.where(taken_N1, rows_ND, 0).to(accumulator)).sum(dim=1)
    slots = bins.order_N >= 0
    d_weights_N[order_N[slots]] = dots_N[slots].to(weights_TK.dtype)
    return d_rows_ND, d_weights_N.view_as(weights_TK)


def _taken(bins: Bins) -> Tensor:
    """True for rows that an expert computes, False for those of dropped slots and for padding.

    Padding rows, of order -1, are in the bins of ``pad_bins``.
    """
    rows_N = torch.arange(bins.order_N.numel(), device=bins.order_N.device)
    return (rows_N < bins.offsets_E1[-1]) & (bins.order_N >= 0)
