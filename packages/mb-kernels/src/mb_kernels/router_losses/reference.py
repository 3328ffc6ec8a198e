"""Reference of ``mb_kernels.router_losses``: the router's losses and load, from their definitions.

With p = softmax(logits), or sigmoids divided by their sum (DeepSeek-V3, arXiv:2412.19437), n_e the
slots routed to expert e and lse a token's logsumexp:

- load-balancing loss ``E / Σ n · Σ_e n_e · mean_t p_te`` (Switch Transformer, arXiv:2101.03961), 1
  when balanced;
- z-loss ``mean_t lse_t²`` (ST-MoE, arXiv:2202.08906).

Letters: T tokens, E experts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mb_kernels.runtime.precision import wide_dtype


class RouterLosses(NamedTuple):
    """What ``router_losses`` returns: scalars in fp32. Only aux_loss has a gradient."""

    aux_loss: Tensor
    """load_balancing_weight · load_balancing_loss + z_weight · z_loss."""
    load_balancing_loss: Tensor
    z_loss: Tensor
    router_entropy: Tensor
    """Mean entropy of the probabilities in nats."""
    load_imbalance: Tensor
    """Slots of the fullest expert over the mean."""
    dropped_fraction: Tensor
    """Share of the routed slots that were not kept."""


def router_losses(
    logits_TE: Tensor,
    probs_TE: Tensor | None,
    tokens_per_expert_E: Tensor,
    kept_slots: Tensor,
    *,
    load_balancing_weight: float,
    z_weight: float,
    score_function: str = "softmax",
    balance_counts_E: Tensor | None = None,
    mask_T: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
    slots: Tensor | None = None,
) -> RouterLosses:
    """Twin of ``mb_kernels.router_losses``, differentiable by plain autograd."""
    balance_counts_E = tokens_per_expert_E if balance_counts_E is None else balance_counts_E
    accumulator = wide_dtype(logits_TE)
    logits_TE = logits_TE.to(accumulator)
    experts, tokens = logits_TE.shape[1], divisor(logits_TE, mask_T, num_tokens)
    counts_E = tokens_per_expert_E.to(accumulator)
    meant = (counts_E.sum() if slots is None else slots.reshape(())).to(accumulator)
    load_E = balance_counts_E.to(accumulator)
    load_E = load_E / load_E.sum().clamp(min=1)
    if mask_T is not None:  # a gradient of zero times what is no number would be none
        logits_TE = logits_TE.where(mask_T[:, None], 0)
    lse_T = torch.logsumexp(logits_TE, dim=-1)
    if score_function == "sigmoid":
        probs_TE = _shares(logits_TE)
    else:
        probs_TE = torch.softmax(logits_TE, dim=-1)
    if mask_T is not None:
        probs_TE, lse_T = probs_TE.where(mask_T[:, None], 0), lse_T.where(mask_T, 0)
    balance = experts * (load_E * probs_TE.sum(dim=0)).sum() / tokens
    z = lse_T.square().sum() / tokens
    return RouterLosses(
        aux_loss=_weighted(load_balancing_weight, balance) + _weighted(z_weight, z),
        load_balancing_loss=balance.detach(),
        z_loss=z.detach(),
        router_entropy=torch.special.entr(probs_TE.detach()).sum() / tokens,
        load_imbalance=counts_E.max() * experts / meant.clamp(min=1),
        dropped_fraction=(meant - kept_slots) / meant.clamp(min=1),
    )


def _weighted(weight: float, loss: Tensor) -> Tensor:
    """Nothing for no weight, be the loss infinite: the z-loss is where a logit is 2e19."""
    return weight * loss if weight else torch.zeros_like(loss)


def _shares(logits_TE: Tensor) -> Tensor:
    """Sigmoids over their sum, also where all of a token's underflow."""
    return torch.softmax(F.logsigmoid(logits_TE), dim=-1)


def divisor(logits_TE: Tensor, mask_T: Tensor | None, num_tokens: Tensor | float | None) -> Tensor:
    """What sums over tokens are divided by, a scalar in their dtype; 1 for no token.

    What is no number of tokens divides as it is, for a NaN in the loss is seen.
    """
    if num_tokens is None:
        num_tokens = logits_TE.shape[0] if mask_T is None else mask_T.sum()
    if not isinstance(num_tokens, Tensor):
        num_tokens = torch.full(
            (), num_tokens, dtype=wide_dtype(logits_TE), device=logits_TE.device
        )
    return torch.where(num_tokens == 0, 1, num_tokens).reshape(()).to(wide_dtype(logits_TE))


def router_losses_backward(
    d_aux: Tensor,
    kept_TE: Tensor,
    balance_counts_E: Tensor,
    lse_T: Tensor,
    tokens: Tensor,
    mask_T: Tensor | None,
    load_balancing_weight: float,
    z_weight: float,
    sigmoid: bool,
) -> Tensor:
    """Gradient of aux_loss for the logits, of what the forward kept; 0 for padding.

    Softmax kept its probabilities: ``p · (c_e - <c, p>) + 2 z_weight lse p / T``, where
    ``c_e = load_balancing_weight E n_e / (T Σ n)`` and T is the divisor ``tokens``. Sigmoid kept
    the logits: ``p · (1 - s) · (c_e - <c, p>)`` with s = sigmoid(logits), and the softmax of the
    z-loss beside it.
    """
    counts_E = balance_counts_E.to(lse_T.dtype)
    scale = load_balancing_weight * kept_TE.shape[1] / tokens
    c_E = scale * counts_E / counts_E.sum().clamp(min=1)
    softmax_TE = probs_TE = kept_TE
    falling_TE: Tensor | float = 1.0
    if sigmoid:
        kept_TE = kept_TE.to(lse_T.dtype)
        softmax_TE = torch.exp(kept_TE - lse_T[:, None])
        probs_TE, falling_TE = _shares(kept_TE), torch.sigmoid(-kept_TE)
    slope_TE = falling_TE * (c_E - (probs_TE @ c_E)[:, None])
    z_TE = (2 * z_weight / tokens) * lse_T[:, None] * softmax_TE
    d_logits_TE = d_aux * (probs_TE * slope_TE + z_TE)
    return d_logits_TE if mask_T is None else d_logits_TE.where(mask_T[:, None], 0)
