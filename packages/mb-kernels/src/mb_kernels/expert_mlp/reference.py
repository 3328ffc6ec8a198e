"""Reference of ``mb_kernels.expert_mlp``: gather, up, activation, down, combine.

The explicit backward is the one the kernels implement (the idea is SonicMoE's, arXiv:2512.14080).
Row r has token t(r), expert e(r) and weight s_r; ``h_r = W1 x_t``, ``a_r = act(h_r)``,
``y_r = W2 a_r``, ``out_t = Σ s_r y_r``. Given ``do_t``:

- ``q_r = W2^T do_t``, and the weight's gradient is ``<do_t, y_r> = <q_r, a_r>``: y_r is never kept.
- ``dh_r = act'(h_r) · s_r q_r``; ``dW2 = Σ do_t (s_r a_r)^T``; ``dW1 = Σ dh_r x_t^T``.
- ``dx_t = Σ W1^T dh_r`` over the rows of the token.
- With biases ``h_r = W1 x_t + b1`` and ``y_r = W2 a_r + b2``: ``<do_t, b2>`` comes to the weight's
  gradient; ``db1 = Σ dh_r``, ``db2 = Σ s_r do_t``.

Letters: T tokens, D hidden, F ffn width (F or 2F for GLU in w1), E experts, K top-k, N rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functions
from torch import Tensor

from mb_kernels.activation import activate_backward
from mb_kernels.bins import Bins
from mb_kernels.derivatives import once_differentiable
from mb_kernels.elementwise.reference import activation as _activate
from mb_kernels.float8.reference import to_float8
from mb_kernels.grouped_gemm.reference import gmm, grouped_gemm, grouped_outer
from mb_kernels.permute.reference import combine, gather
from mb_kernels.quantize.reference import dequantize, quantize
from mb_kernels.recomputing import recomputed
from mb_kernels.runtime.precision import wide_dtype


def expert_mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    *,
    activation: str = "swiglu",
    b1_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    max_rows: int | None = None,
    recompute: bool = False,
    saved_activation_bits: int | None = None,
    fp8: bool = False,
) -> Tensor:
    """Twin of ``mb_kernels.expert_mlp``, differentiable by plain autograd.

    ``max_rows`` saves nothing here; more rows give NaN all the same.
    """
    if recompute:
        return recomputed(
            expert_mlp,
            *(x_TD, w1_EFD, w2_EDF, bins, weights_TK),
            activation=activation,
            b1_EF=b1_EF,
            b2_ED=b2_ED,
            max_rows=max_rows,
            fp8=fp8,
        )
    if max_rows is not None and bins.offsets_E1[-1] > max_rows:
        weights_TK = weights_TK * torch.nan
    if fp8:
        options = (bins, activation, saved_activation_bits)
        return _InFloat8.apply(x_TD, w1_EFD, w2_EDF, weights_TK, b1_EF, b2_ED, *options)
    y_TD, h_NF = expert_mlp_forward(
        *(x_TD, w1_EFD, w2_EDF, bins, weights_TK, activation, b1_EF, b2_ED)
    )
    if saved_activation_bits is None:
        return y_TD
    # The value of y, with the gradient that the rounded pre-activations give.
    rounded_NF = _rounded(h_NF, saved_activation_bits)
    rounded_NF = h_NF + (rounded_NF - h_NF).detach()
    rounded_TD = _down(rounded_NF, w2_EDF, b2_ED, bins, weights_TK, activation)
    return rounded_TD + (y_TD - rounded_TD).detach()


def _float8_grouped_gemm(
    x_NK: Tensor, w: Tensor, offsets_E1: Tensor, *, transpose_weight: bool = True
) -> Tensor:
    """``grouped_gemm`` of what ``to_float8`` makes of x [N, K] and w, in the dtype of x."""
    codes_NK, scales_N = to_float8(x_NK)
    codes_EMK, scales_EM = to_float8(w, transpose=not transpose_weight)
    kind = wide_dtype(x_NK)
    y_NM = grouped_gemm(codes_NK.to(kind), codes_EMK.to(kind), offsets_E1)
    scales_RM = scales_EM.repeat_interleave(offsets_E1.diff().long(), dim=0).to(kind)
    y_NM[: scales_RM.shape[0]] *= scales_N[: scales_RM.shape[0], None].to(kind) * scales_RM
    return y_NM.to(x_NK.dtype)


def _rounded(h_NF: Tensor, bits: int) -> Tensor:
    even_NF = functions.pad(h_NF, (0, h_NF.shape[1] % 2))  # in 4 bits two are a byte
    codes, scales = quantize(even_NF, bits)
    return dequantize(codes, scales, bits=bits, dtype=h_NF.dtype)[:, : h_NF.shape[1]]


class _InFloat8(torch.autograd.Function):
    """The formulas atop this module: what rounds is not differentiated."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, w1, w2, weights, b1, b2, ctx.bins, ctx.activation, bits = inputs
        fixed = (w1, w2, ctx.bins, weights)
        y, h = expert_mlp_forward(x, *fixed, ctx.activation, b1, b2, fp8=True)
        ctx.save_for_backward(*inputs[:6], h if bits is None else _rounded(h, bits))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, weights, b1, b2, h = ctx.saved_tensors
        fixed = (w1, w2, ctx.bins, weights)
        grads = expert_mlp_backward(do, x, *fixed, h, ctx.activation, b1, b2, fp8=True)
        return (*grads, None, None, None)


def _down(
    h_NF: Tensor,
    w2_EDF: Tensor,
    b2_ED: Tensor | None,
    bins: Bins,
    weights_TK: Tensor,
    activation: str,
    product: Callable[..., Tensor] = grouped_gemm,
) -> Tensor:
    y_ND = product(_activate(h_NF, activation), w2_EDF, bins.offsets_E1)
    return combine(_add_bias(y_ND, b2_ED, bins), bins, weights_TK)


def _add_bias(rows_NC: Tensor, bias_EC: Tensor | None, bins: Bins) -> Tensor:
    """Rows plus their experts' biases, in fp32 (fp64 for fp64), rounded once."""
    if bias_EC is None:
        return rows_NC
    wide = wide_dtype(rows_NC)
    return (rows_NC.to(wide) + _rows_of(bias_EC.to(wide), bins)).to(rows_NC.dtype)


def _rows_of(bias_EC: Tensor, bins: Bins) -> Tensor:
    """[N, C]: to each row its expert's; zeros to rows of no expert."""
    counts_E = bins.offsets_E1.diff().long()
    rows_RC = bias_EC.repeat_interleave(counts_E, dim=0)
    nobody = bins.order_N.shape[0] - rows_RC.shape[0]
    return torch.cat([rows_RC, rows_RC.new_zeros(nobody, bias_EC.shape[1])])


def expert_mlp_forward(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    activation: str,
    b1_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    *,
    fp8: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [T, D] and the pre-activations h [N, F or 2F] that the backward needs."""
    product = _float8_grouped_gemm if fp8 else grouped_gemm
    h_NF = product(gather(x_TD, bins, weights_TK.shape[1]), w1_EFD, bins.offsets_E1)
    h_NF = _add_bias(h_NF, b1_EF, bins)
    return _down(h_NF, w2_EDF, b2_ED, bins, weights_TK, activation, product), h_NF


def expert_mlp_backward(
    do_TD: Tensor,
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    h_NF: Tensor,
    activation: str,
    b1_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    *,
    fp8: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients for x, w1, w2, weights, b1 and b2 by the formulas atop this module."""
    product = _float8_grouped_gemm if fp8 else grouped_gemm
    top_k = weights_TK.shape[1]
    order_N = bins.order_N.long()
    do_ND = gather(do_TD, bins, top_k)
    wide = wide_dtype(x_TD)
    s_N1 = weights_TK.flatten()[order_N, None].to(wide)
    a_NF = _activate(h_NF, activation)
    q_NF = product(do_ND, w2_EDF, bins.offsets_E1, transpose_weight=False).to(wide)

    dots_N = (q_NF * a_NF.to(wide)).sum(dim=1)
    dh_NF = activate_backward(s_N1 * q_NF, h_NF.to(wide), activation)
    d_b1_EF = None if b1_EF is None else _sums(dh_NF, bins).to(b1_EF.dtype)
    d_b2_ED = None
    if b2_ED is not None:
        dots_N = dots_N + (do_ND.to(wide) * _rows_of(b2_ED.to(wide), bins)).sum(dim=1)
        d_b2_ED = _sums(s_N1 * do_ND.to(wide), bins).to(b2_ED.dtype)
    d_weights_N = weights_TK.new_zeros(weights_TK.numel())
    d_weights_N[order_N] = dots_N.to(weights_TK.dtype)
    dh_NF = dh_NF.to(h_NF.dtype)
    d_w2_EDF = grouped_outer(do_ND, (s_N1 * a_NF).to(do_ND.dtype), bins.offsets_E1)
    d_w1_EFD = grouped_outer(dh_NF, gather(x_TD, bins, top_k), bins.offsets_E1)
    dx_ND = product(dh_NF, w1_EFD, bins.offsets_E1, transpose_weight=False)
    dx_TD = combine(dx_ND, bins, None, top_k)
    return dx_TD, d_w1_EFD, d_w2_EDF, d_weights_N.view_as(weights_TK), d_b1_EF, d_b2_ED


def _sums(rows_NC: Tensor, bins: Bins) -> Tensor:
    """[E, C]: the sum of each expert's rows."""
    return grouped_outer(rows_NC.new_ones(rows_NC.shape[0], 1), rows_NC, bins.offsets_E1)[:, 0]


def grouped_experts(
    x_RD: Tensor,
    tokens_per_expert_E: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None = None,
    *,
    activation: str = "swiglu",
) -> Tensor:
    """Twin of ``mb_kernels.grouped_experts``, differentiable by plain autograd."""
    w1 = w1 if w3 is None else torch.cat([w1, w3], dim=1)
    a_RF = _activate(gmm(x_RD, w1, tokens_per_expert_E, trans_b=True), activation)
    return gmm(a_RF, w2, tokens_per_expert_E, trans_b=True)
