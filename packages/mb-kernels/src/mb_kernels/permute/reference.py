"""Reference of ``mb_kernels.permute``: tokens to rows sorted by expert, and back.

Letters: T tokens, D hidden, K top-k, N = T·K rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mb_kernels.bins import Bins
from mb_kernels.runtime.precision import wide_dtype


def gather(x_TD: Tensor, bins: Bins, top_k: int) -> Tensor:
    """Twin of ``mb_kernels.gather``, differentiable by plain autograd."""
    return _with_zero(x_TD)[torch.where(_taken(bins), bins.order_N.long() // top_k, -1)]


def combine(rows_ND: Tensor, bins: Bins, weights_TK: Tensor | None, top_k: int = 0) -> Tensor:
    """Twin of ``mb_kernels.combine``; ``weights_TK=None`` with ``top_k`` sums unweighted."""
    k = top_k if weights_TK is None else weights_TK.shape[1]
    inverse_TK = bins.inverse_N.view(-1, k).long()
    accumulator = wide_dtype(rows_ND)
    padded_ND = _with_zero(rows_ND)
    y_TD = torch.zeros(
        inverse_TK.shape[0], rows_ND.shape[1], dtype=accumulator, device=rows_ND.device
    )
    for choice in range(k):
        row_T = inverse_TK[:, choice]
        term_TD = padded_ND[row_T].to(accumulator)
        if weights_TK is not None:  # that of a dropped slot may be NaN
            weight_T = torch.where(row_T >= 0, weights_TK[:, choice], 0)
            term_TD = term_TD * weight_T[:, None].to(accumulator)
        y_TD = y_TD + term_TD
    return y_TD.to(rows_ND.dtype)


def combine_backward(
    dy_TD: Tensor, rows_ND: Tensor, bins: Bins, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``combine`` for rows_ND and weights_TK."""
    top_k = weights_TK.shape[1]
    taken_N = _taken(bins)
    slot_N = torch.where(taken_N, bins.order_N.long(), -1)
    accumulator = wide_dtype(rows_ND)
    dy_ND = _with_zero(dy_TD)[slot_N // top_k].to(accumulator)
    weight_N1 = _with_zero(weights_TK.reshape(-1, 1))[slot_N].to(accumulator)
    d_rows_ND = (dy_ND * weight_N1).to(rows_ND.dtype)
    d_weights_N = torch.zeros_like(weights_TK).flatten()
    dots_N = (dy_ND * rows_ND.to(accumulator)).sum(dim=1)
    d_weights_N[slot_N[taken_N]] = dots_N[taken_N].to(weights_TK.dtype)
    return d_rows_ND, d_weights_N.view_as(weights_TK)


def _with_zero(rows_ND: Tensor) -> Tensor:
    """The rows, and behind the last one, at -1, a row of zeros."""
    return F.pad(rows_ND, (0, 0, 0, 1))


def _taken(bins: Bins) -> Tensor:
    """True for rows that an expert computes, False for those of dropped slots and for padding.

    Padding rows, of order -1, are in the bins of ``pad_bins``.
    """
    rows_N = torch.arange(bins.order_N.numel(), device=bins.order_N.device)
    return (rows_N < bins.offsets_E1[-1]) & (bins.order_N >= 0)
