"""Cross entropy of a language model's head that never keeps the logits.

Works on a slice of tokens at a time: the slice's logits, their loss in fp32, and in place of the
logits their gradient, softmax minus one-hot, which is multiplied into the gradients of hidden
states and weight at once (the scheme of Liger-Kernel, arXiv 2410.10989). Of [tokens, V] numbers
only one slice ever exists. On a GPU a Triton kernel turns logits into loss and gradient in two
passes over a row.

Letters: T tokens, R tokens of a slice, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Tokens per slice: large products are what is fast on a GPU, where 8192 x 50,304 logits are 0.8 GB
# in bf16; on a CPU a slice of fp32 logits is 50 MB.
_SLICE = {"cpu": 256, "cuda": 8192}


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Mean cross entropy of `x_TD @ weight_VD^T` against `labels_T`, without keeping the logits.

    Args:
        x_TD: bf16 or fp32; the product is computed in its dtype, the rest in fp32.
        weight_VD: fp32, or the dtype of x.
        labels_T: int64 in [0, V), at least one.

    Returns:
        The loss in nats, fp32 scalar.
    """
    return _LinearCrossEntropy.apply(x_TD, weight_VD, labels_T)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        tokens, rows = x_TD.shape[0], _SLICE.get(x_TD.device.type, 1024)
        w_VD = weight_VD.to(x_TD.dtype)
        losses_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if need_x else None
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        for start in range(0, tokens, rows):
            here = slice(start, start + rows)
            logits_RV = x_TD[here] @ w_VD.t()
            losses_T[here], grad_RV = loss_and_gradient(logits_RV, labels_T[here])
            if dx_TD is not None:
                torch.mm(grad_RV, w_VD, out=dx_TD[here])
            if dw_VD is not None:
                _add_product(dw_VD, grad_RV.t(), x_TD[here])
        ctx.save_for_backward(dx_TD, dw_VD)
        ctx.weight_dtype, ctx.tokens = weight_VD.dtype, tokens
        return losses_T.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx_TD, dw_VD = ctx.saved_tensors
        dx = dw = None
        if dx_TD is not None:
            dx = dx_TD * (grads[0] / ctx.tokens).to(dx_TD.dtype)
        if dw_VD is not None:
            dw = (dw_VD * (grads[0] / ctx.tokens)).to(ctx.weight_dtype)
        return dx, dw, None


def loss_and_gradient(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each row [R] in fp32, and d loss / d logits [R, V] in the place of the logits.

    Args:
        logits_RV: contiguous, bf16, fp16 or fp32; overwritten.
        labels_R: int64 in [0, V).
    """
    if logits_RV.is_cuda:
        from mb_train.models.cross_entropy_kernel import loss_and_gradient_by_kernel

        return loss_and_gradient_by_kernel(logits_RV, labels_R)
    labels_R1 = labels_R[:, None]
    wide_RV = logits_RV.float()
    lse_R1 = wide_RV.logsumexp(1, keepdim=True)
    losses_R = (lse_R1 - wide_RV.gather(1, labels_R1))[:, 0]
    grad_RV = wide_RV.sub_(lse_R1).exp_()
    grad_RV.scatter_add_(1, labels_R1, grad_RV.new_full(labels_R1.shape, -1.0))
    return losses_R, grad_RV.to(logits_RV.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (fp32) += a @ b, in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def weighted_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    weights_T: Tensor,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Sum of the tokens' losses times `weights_T`."""
    logits_TV = (x_TD @ weight_VD.to(x_TD.dtype).t()).float()
    if bias_V is not None:
        logits_TV = logits_TV + bias_V
    losses_T = torch.nn.functional.cross_entropy(logits_TV, labels_T, reduction="none")
    return (losses_T * weights_T).sum()
