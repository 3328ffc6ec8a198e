"""Reference of ``mb_kernels.routing``: top-k, alone or of a softmax, and bins of slots by expert.

Letters: T tokens, E experts, K top-k, N = T·K slots, E1 = E + 1.
"""

import torch
from torch import Tensor

from mb_kernels.bins import Bins
from mb_kernels.runtime.precision import wide


def topk_ids(scores_TE: Tensor, k: int) -> Tensor:
    """Twin of ``mb_kernels.topk_ids``."""
    # A stable descending sort keeps equal scores in id order; torch.topk promises no order.
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k].to(torch.int32)


def topk_softmax(
    logits_TE: Tensor, k: int, *, renormalize: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of ``mb_kernels.topk_softmax``, differentiable by plain autograd."""
    logits_TE = wide(logits_TE)
    probs_TE = torch.softmax(logits_TE, dim=-1)
    ids_TK = topk_ids(logits_TE, k)
    weights_TK = probs_TE.gather(1, ids_TK.long())
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, ids_TK, probs_TE


def topk_softmax_backward(
    d_weights_TK: Tensor,
    d_probs_TE: Tensor | None,
    probs_TE: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    renormalize: bool,
) -> Tensor:
    """Gradient of ``topk_softmax`` for the logits, in the dtype of ``probs_TE``.

    With ``w = p[ids] / Σ p[ids]`` the gradient of the chosen p is ``(dw - <dw, w>) / Σ p[ids]``;
    a softmax then gives ``dl = p · (dp - <dp, p>)``.
    """
    ids_TK = ids_TK.long()
    d_chosen_TK = d_weights_TK
    if renormalize:
        inner_T1 = (d_weights_TK * weights_TK).sum(dim=-1, keepdim=True)
        total_T1 = probs_TE.gather(1, ids_TK).sum(dim=-1, keepdim=True)
        d_chosen_TK = (d_weights_TK - inner_T1) / total_T1
    d_p_TE = torch.zeros_like(probs_TE) if d_probs_TE is None else d_probs_TE.clone()
    d_p_TE.scatter_add_(1, ids_TK, d_chosen_TK)
    return probs_TE * (d_p_TE - (d_p_TE * probs_TE).sum(dim=-1, keepdim=True))


def bin_tokens(expert_ids_TK: Tensor, num_experts: int, *, capacity: int | None = None) -> Bins:
    """Twin of ``mb_kernels.bin_tokens``."""
    ids_N = expert_ids_TK.reshape(-1).long()
    # A slot of no expert sorts behind all of them.
    ids_N = torch.where((ids_N >= 0) & (ids_N < num_experts), ids_N, num_experts)
    counts_E = _count(ids_N, num_experts)
    order_N = ids_N.argsort(stable=True)
    if capacity is not None:
        starts_E1 = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
        sorted_ids_N = ids_N[order_N]
        position_N = torch.arange(ids_N.numel(), device=ids_N.device) - starts_E1[sorted_ids_N]
        dropped_N = (position_N >= capacity) | (sorted_ids_N == num_experts)
        # Dropped slots move behind the kept ones of all experts; the sort keeps their order.
        order_N = order_N[dropped_N.to(torch.int8).argsort(stable=True)]
    kept_E = counts_E if capacity is None else counts_E.clamp(max=capacity)
    offsets_E1 = torch.cat([kept_E.new_zeros(1), kept_E.cumsum(0)])
    rows_N = torch.arange(ids_N.numel(), device=ids_N.device)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.where(rows_N < offsets_E1[-1], rows_N, -1)
    return Bins(*(t.to(torch.int32) for t in (order_N, inverse_N, counts_E, offsets_E1)))


def _count(ids_N: Tensor, num_experts: int) -> Tensor:
    """Slots per expert, without the host sync of torch.bincount; id num_experts is not counted."""
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=ids_N.device)
    return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N))[:num_experts]
