"""The expert MLP step by step, for experts that the fused op cannot compute.

These have a gate that is not recognised, weights in parts (`mb_layers.factored`), or a norm after
each expert. With plain autograd such experts would save four tensors of rows, of T K D and T K F
elements. Here only x and the pre-activations are saved, as by the fused op: the backward pass
gathers and activates rows again, and computes the gradients of routing weights without the experts'
outputs, by

    <do, W2 a + b2> = <W2^T do, a> + <do, b2>

Letters: T tokens, D hidden, F expert ffn width, E experts, K top-k, N = T K rows, M columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mb_kernels
import torch
from mb_kernels import Bins
from mb_kernels.derivatives import once_differentiable
from torch import Tensor

from mb_layers.factored import (
    Factored,
    WeightSpec,
    flatten,
    grouped_linear,
    grouped_outer,
    unflatten,
    weight_gradients,
)
from mb_layers.tensors import at_least_fp32

Activate = Callable[[Tensor], Tensor]


def expert_mlp_in_steps(
    x_TD: Tensor,
    w1: Tensor | Factored,
    w2: Tensor | Factored,
    bins: Bins,
    weights_TK: Tensor,
    activate: Activate,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    transpose_weight: bool = True,
    after: Activate | None = None,
    learned: bool = False,
) -> Tensor:
    """Send every token through its experts and sum their weighted outputs.

    Args:
        x_TD, bins, weights_TK: as for `mb_kernels.expert_mlp`.
        w1, w2: [E, rows, D] and [E, D, F]; with `transpose_weight=False` [E, D, rows], [E, F, D].
        activate: maps the pre-activations [N, rows] to [N, F].
        b1, b2: biases per expert, [E, rows] and [E, D].
        after: applied to each expert's output [N, D] before it is weighted.
        learned: `activate` has parameters of its own, which get their gradients by plain autograd.
    """
    # A compiled graph chooses by itself what to keep.
    if after is None and not learned and not torch.compiler.is_compiling():
        spec1, tensors1 = flatten(w1)
        spec2, tensors2 = flatten(w2)
        top_k = weights_TK.shape[1]
        h = _FromTokens.apply(x_TD, bins, top_k, spec1, transpose_weight, b1, *tensors1)
        return _ToTokens.apply(
            h, weights_TK, bins, activate, spec2, transpose_weight, b2, *tensors2
        )
    rows_ND = mb_kernels.gather(x_TD, bins, weights_TK.shape[1])
    a_NF = activate(_linear(rows_ND, w1, b1, bins, transpose_weight))
    y_ND = _linear(a_NF, w2, b2, bins, transpose_weight)
    return mb_kernels.combine(y_ND if after is None else after(y_ND), bins, weights_TK)


class _FromTokens(torch.autograd.Function):
    """Pre-activations [N, M] of tokens [T, D]; their rows are gathered again in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        bins: Bins,
        top_k: int,
        spec: WeightSpec,
        transpose_weight: bool,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, *bins, *tensors)
        ctx.top_k, ctx.spec, ctx.transpose_weight = top_k, spec, transpose_weight
        rows_ND = mb_kernels.gather(x_TD, bins, top_k)
        return _linear(rows_ND, unflatten(spec, tensors), bias, bins, transpose_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_NM: Tensor) -> tuple[Any, ...]:
        x_TD, *saved = ctx.saved_tensors
        bins, weight = Bins(*saved[:4]), unflatten(ctx.spec, saved[4:])
        wants_x, _, _, _, _, wants_bias, *wanted = ctx.needs_input_grad
        dx_TD = d_bias = None
        if wants_x:
            ones_TK = x_TD.new_ones(x_TD.shape[0], ctx.top_k)
            d_rows_ND = grouped_linear(
                dh_NM, weight, bins.offsets_E1, transpose_weight=not ctx.transpose_weight
            )
            dx_TD = mb_kernels.combine(d_rows_ND, bins, ones_TK)
        if wants_bias:
            d_bias = _sums(dh_NM, bins)
        d_tensors: list[Tensor | None] = [None] * len(wanted)
        if any(wanted):
            rows_ND = mb_kernels.gather(x_TD, bins, ctx.top_k)
            d_tensors = weight_gradients(
                dh_NM, rows_ND, weight, bins.offsets_E1, wanted, ctx.transpose_weight
            )
        return dx_TD, None, None, None, None, d_bias, *d_tensors


class _ToTokens(torch.autograd.Function):
    """Weighted sums [T, D] of the experts' outputs for pre-activations [N, M], which are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        h_NM: Tensor,
        weights_TK: Tensor,
        bins: Bins,
        activate: Activate,
        spec: WeightSpec,
        transpose_weight: bool,
        bias: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(h_NM, weights_TK, bias, *bins, *tensors)
        ctx.activate, ctx.spec, ctx.transpose_weight = activate, spec, transpose_weight
        weight = unflatten(spec, tensors)
        y_ND = _linear(activate(h_NM), weight, bias, bins, transpose_weight)
        return mb_kernels.combine(y_ND, bins, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_TD: Tensor) -> tuple[Any, ...]:
        h_NM, weights_TK, bias, *saved = ctx.saved_tensors
        bins, weight = Bins(*saved[:4]), unflatten(ctx.spec, saved[4:])
        wants_h, wants_weights, _, _, _, _, wants_bias, *wanted = ctx.needs_input_grad
        with torch.enable_grad():
            h_NM = h_NM.detach().requires_grad_()
            a_NF = ctx.activate(h_NM)
        do_ND = mb_kernels.gather(do_TD, bins, weights_TK.shape[1])  # 0 for dropped slots
        weight_N1 = weights_TK.reshape(-1)[bins.order_N.long()][:, None]
        dh_NM = d_weights_TK = d_bias = None
        if wants_h or wants_weights:
            da_NF = grouped_linear(
                do_ND, weight, bins.offsets_E1, transpose_weight=not ctx.transpose_weight
            )
            if wants_weights:
                dots_N = _dots(da_NF, a_NF.detach(), weights_TK.dtype)
                if bias is not None:
                    dots_N += _dots(do_ND, _bias_rows(bias, bins), weights_TK.dtype)
                rows_N = bins.inverse_N.long()
                d_weights_TK = torch.where(rows_N < 0, 0, dots_N[rows_N]).view_as(weights_TK)
            if wants_h:
                da_NF.mul_(weight_N1)  # in fp32, rounded once; vmap knows no `out=`
                (dh_NM,) = torch.autograd.grad(a_NF, h_NM, da_NF)
        dy_ND = do_ND.mul_(weight_N1)
        if wants_bias:
            d_bias = _sums(dy_ND, bins)
        d_tensors = weight_gradients(
            dy_ND, a_NF.detach(), weight, bins.offsets_E1, wanted, ctx.transpose_weight
        )
        return dh_NM, d_weights_TK, None, None, None, None, d_bias, *d_tensors


def _dots(x_NC: Tensor, y_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """Each row's inner product, in fp32 at least: fp16 holds no product of two small numbers."""
    return (at_least_fp32(x_NC) * y_NC).sum(dim=1, dtype=dtype)


def _linear(
    x_NC: Tensor, weight: Tensor | Factored, bias: Tensor | None, bins: Bins, transpose: bool
) -> Tensor:
    y_NR = grouped_linear(x_NC, weight, bins.offsets_E1, transpose_weight=transpose)
    return y_NR if bias is None else y_NR + _bias_rows(bias, bins)


def _bias_rows(bias_EM: Tensor, bins: Bins) -> Tensor:
    """The bias of each row's expert, [N, M]. Rows of dropped slots get any; they are not used."""
    rows_N = torch.arange(bins.order_N.shape[0], device=bias_EM.device, dtype=torch.int32)
    expert_N = torch.searchsorted(bins.offsets_E1[1:], rows_N, right=True)
    return bias_EM[expert_N.clamp(max=bias_EM.shape[0] - 1)]


def _sums(rows_NM: Tensor, bins: Bins) -> Tensor:
    """Each expert's sum over its rows, [E, M], by a product with 16 columns of ones."""
    ones_N16 = rows_NM.new_ones(rows_NM.shape[0], 16)
    return grouped_outer(ones_N16, rows_NM, bins.offsets_E1)[:, 0]
