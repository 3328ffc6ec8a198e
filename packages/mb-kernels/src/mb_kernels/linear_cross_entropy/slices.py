"""The loop that both implementations share: losses and gradients, one slice of tokens at a time.

For each slice the logits are computed, then the losses, then the gradient of the logits (softmax
minus one-hot) in their place, and from it at once the gradients of hidden states, weight and bias
(the scheme of Liger-Kernel, arXiv 2410.10989). So logits never exist for more than one slice.

Letters: T tokens, R tokens of a slice, D hidden, V vocabulary or this rank's share of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mb_kernels.runtime.precision import wide_dtype

# Logits of a slice on a GPU, 1 GB of them in bf16, and its tokens at most: large products are what
# is fast there. On a CPU a slice stays within its caches' reach.
_GPU_LOGITS, _GPU_ROWS = 2**29, 8192
_CPU_LOGITS, _CPU_ROWS = 2**24, 256

# (logits_RV, labels_R, weights_R) -> losses_R, and the gradient in the place of the logits.
Finish = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Needs(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weight: bool
    bias: bool


def run(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    weights_T: Tensor,
    needs: Needs,
    finish: Finish,
    *,
    vocabulary: int | None = None,
) -> tuple[Tensor, ...]:
    """losses_T unweighted in fp32 (fp64 for fp64); d sum(weights losses) / d x, weight and bias.

    dx has the dtype of x, the others are summed up in fp32; what is not needed is empty.
    The loss of a label that no vocabulary of the given size (None: the weight's rows) has is NaN.
    """
    tokens = x_TD.shape[0]
    wide = wide_dtype(x_TD)
    w_VD = weight_VD.to(x_TD.dtype)
    b_V = None if bias_V is None else bias_V.to(x_TD.dtype)
    losses_T = x_TD.new_empty(tokens, dtype=wide)
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs.x else None
    dw_VD = x_TD.new_zeros(weight_VD.shape, dtype=wide) if needs.weight else None
    db_V = x_TD.new_zeros(weight_VD.shape[:1], dtype=wide) if needs.bias else None
    vocabulary = vocabulary or weight_VD.shape[0]
    rows = _rows(x_TD, vocabulary)  # the same on all ranks, however many labels each of them has
    for start in range(0, tokens, rows):
        here = slice(start, start + rows)
        # What is no number in a token without a label would be none times 0 in the weight's sum.
        x_RD = x_TD[here].where((labels_T[here] >= 0)[:, None], 0)
        logits_RV = x_RD @ w_VD.t() if b_V is None else torch.addmm(b_V, x_RD, w_VD.t())
        losses_T[here], grad_RV = finish(logits_RV, labels_T[here], weights_T[here])
        if dx_TD is not None:
            torch.mm(grad_RV, w_VD, out=dx_TD[here])
        if dw_VD is not None:
            _add_product(dw_VD, grad_RV.t(), x_RD)
        if db_V is not None:
            db_V += grad_RV.sum(0, dtype=wide)
    losses_T.masked_fill_(labels_T >= vocabulary, torch.nan)
    return losses_T, *(x_TD.new_empty(0) if g is None else g for g in (dx_TD, dw_VD, db_V))


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """grad times a scalar tensor, in grad's dtype, the scale not rounded to it."""
    # One dimension, not none: then the product is computed in the wider of both dtypes.
    scale = scale.reshape(1)
    if grad.dtype == scale.dtype:  # no rounding, so no out=, which is_grads_batched does not take
        return grad * scale
    return torch.mul(grad, scale, out=torch.empty_like(grad))


def _rows(x: Tensor, vocabulary: int) -> int:
    on_cpu = x.device.type == "cpu"
    logits, most = (_CPU_LOGITS, _CPU_ROWS) if on_cpu else (_GPU_LOGITS, _GPU_ROWS)
    fitting = logits // max(vocabulary, 1)
    return min(most, max(fitting - fitting % 128, 16))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (fp32) += a @ b, in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        # The product's own fp32 sums, not rounded to 16 bits on the way: 0.85 ms for 0.95 of a
        # slice of 8192 tokens, 50,304 x 768, on an H200.
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype is torch.float16:
        # The loss scale is not in it yet: a sum over the slice that fp16 does not hold would
        # overflow whatever the scale falls to.
        total.addmm_(a.float(), b.float())
    else:
        total.add_(a @ b)
