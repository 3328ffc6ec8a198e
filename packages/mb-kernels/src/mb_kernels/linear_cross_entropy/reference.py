"""The head's cross entropy in plain PyTorch: all logits at once, differentiated by autograd.

Letters: T tokens, R tokens of a slice, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from mb_kernels.runtime.precision import wide


def linear_cross_entropy(
    x: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bias_V: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """As `mb_kernels.linear_cross_entropy`, for a whole vocabulary; any number of derivatives."""
    labels_T = labels.reshape(-1).long()
    valid_T = labels_T >= 0
    x_TD = x.reshape(labels.numel(), x.shape[-1]).where(valid_T[:, None], 0)
    logits_TV = x_TD @ weight_VD.to(x.dtype).t()
    if bias_V is not None:
        logits_TV = logits_TV + bias_V.to(x.dtype)
    log_probs_TV = torch.log_softmax(wide(logits_TV), dim=1)
    losses_T = -log_probs_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0]
    losses_T = torch.where(valid_T, losses_T, 0)
    if reduction == "none":
        return losses_T.detach().view(labels.shape)
    weights_T = valid_T.to(losses_T.dtype)
    if weights is not None:
        weights_T = torch.where(valid_T, weights.reshape(-1).to(losses_T.dtype), 0)
    total = (losses_T * weights_T).sum()
    if reduction == "sum":
        return total
    return total / divisor(weights_T)


def divisor(weights_T: Tensor) -> Tensor:
    """What a mean divides by: the sum of the weights, or of no token 1.

    Not a tiny number: with a loss scale its inverse is infinite, and NaN times a gradient of 0.
    """
    total = weights_T.sum()
    return torch.where(total == 0, 1, total)


def row_statistics(logits_RV: Tensor, labels_R: Tensor, start: int) -> Tensor:
    """Highest score, sum of exponentials relative to it, and the label's score, [R, 3].

    Args:
        logits_RV: scores of the labels from `start` on.
        labels_R: in [start, start + V), or elsewhere: then the label's score is 0.
    """
    wide_RV = wide(logits_RV)
    # Finite where a share of the vocabulary is all padding, of scores -inf.
    peak_R = wide_RV.amax(1).clamp(min=torch.finfo(wide_RV.dtype).min)
    total_R = (wide_RV - peak_R[:, None]).exp_().sum(1)
    here_R = (labels_R >= start) & (labels_R < start + logits_RV.shape[1])
    score_R1 = wide_RV.gather(1, torch.where(here_R, labels_R - start, 0)[:, None])
    score_R = torch.where(here_R, score_R1[:, 0], 0)
    return torch.stack([peak_R, total_R, score_R], dim=1)


def row_gradients(
    logits_RV: Tensor,
    labels_R: Tensor,
    peaks_R: Tensor,
    totals_R: Tensor,
    weights_R: Tensor,
    start: int,
) -> Tensor:
    """weights (softmax - one-hot) in the dtype of the logits, which may be overwritten.

    Args:
        peaks_R, totals_R: of the whole vocabulary the highest score and, relative to it, the
            logarithm of the sum of exponentials. Added up first they would lose digits of the
            second: at scores of 300 a gradient is then right to 1e-5 alone.
    """
    grad_RV = (wide(logits_RV) - peaks_R[:, None]).sub_(totals_R[:, None]).exp_()
    here_R = (labels_R >= start) & (labels_R < start + logits_RV.shape[1])
    index_R1 = torch.where(here_R, labels_R - start, 0)[:, None]
    grad_RV.scatter_add_(1, index_R1, -here_R[:, None].to(grad_RV.dtype))
    return (grad_RV * weights_R[:, None]).to(logits_RV.dtype)
