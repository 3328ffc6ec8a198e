"""Computes the output of the routed experts, for every kind of routing.

Usually a token has K slots, and its weights scale the experts' outputs. Dispatchers and experts
know only this kind. Here three others are reduced to it: experts that choose their tokens, weights
that scale the experts' inputs, and zero experts, which return their token.

Letters: T tokens, D hidden, E experts, Z zero experts, K top-k, N rows of a routing by experts.
"""

from __future__ import annotations

import mb_kernels
import torch
from torch import Tensor

from mb_layers.config import MoEConfig
from mb_layers.dispatch import Dispatched, TokenDispatcher, replaced
from mb_layers.experts import Experts
from mb_layers.router import RouterOutput


def run_routed(
    x_TD: Tensor,
    routed: RouterOutput,
    config: MoEConfig,
    dispatcher: TokenDispatcher,
    experts: Experts,
) -> tuple[Tensor, Dispatched]:
    """Return y_TD, the weighted sum over each token's experts, and what was dispatched.

    With zero experts, `tokens_per_expert_E` ends with their counts, and `kept_slots` includes their
    slots.
    """
    weights_TK, ids_TK = routed.weights_TK, routed.expert_ids_TK
    rows_TD = x_TD if routed.token_ids_N is None else x_TD[routed.token_ids_N]
    if config.shared_expert_weighted_sum:
        weights_TK = weights_TK * (config.top_k / (config.top_k + 1))
    is_zero_TK = None
    if config.num_zero_experts:
        is_zero_TK = (ids_TK >= config.num_experts) & (ids_TK < config.num_choices)
        ids_TK = torch.where(is_zero_TK, -1, ids_TK)
    if config.weights_on_input:
        y_TD, dispatched = _weigh_inputs(rows_TD, weights_TK, ids_TK, dispatcher, experts)
    else:
        dispatched = dispatcher.dispatch(rows_TD, weights_TK, ids_TK)
        y_TD = dispatcher.combine(experts(dispatched), dispatched)
    if is_zero_TK is not None:
        weight_T1 = torch.where(is_zero_TK, weights_TK, 0).sum(dim=1, keepdim=True)
        y_TD = y_TD + (rows_TD * weight_T1).to(y_TD.dtype)
        dispatched = _count_zero_experts(dispatched, routed.expert_ids_TK, config)
    if routed.token_ids_N is not None:
        summed_TD = x_TD.new_zeros(x_TD.shape, dtype=torch.promote_types(y_TD.dtype, torch.float32))
        summed_TD = summed_TD.index_add(0, routed.token_ids_N, y_TD.to(summed_TD.dtype))
        y_TD = summed_TD.to(y_TD.dtype)
    return y_TD, dispatched


def _weigh_inputs(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    dispatcher: TokenDispatcher,
    experts: Experts,
) -> tuple[Tensor, Dispatched]:
    """Dispatch a row per slot, the token times its weight; sum the outputs with weights of 1."""
    top_k = ids_TK.shape[1]
    rows_ND = (x_TD[:, None] * weights_TK[..., None]).to(x_TD.dtype).flatten(0, 1)
    ones_N1 = torch.ones_like(weights_TK).view(-1, 1)
    dispatched = dispatcher.dispatch(rows_ND, ones_N1, ids_TK.reshape(-1, 1))
    y_ND = dispatcher.combine(experts(dispatched), dispatched)
    return y_ND.view(-1, top_k, y_ND.shape[1]).sum(dim=1), dispatched


def _count_zero_experts(
    dispatched: Dispatched, expert_ids_TK: Tensor, config: MoEConfig
) -> Dispatched:
    zero_TK = (expert_ids_TK - config.num_experts).clamp(min=-1)
    counts_Z = mb_kernels.bin_tokens(zero_TK, config.num_zero_experts).tokens_per_expert_E
    return replaced(
        dispatched,
        tokens_per_expert_E=torch.cat([dispatched.tokens_per_expert_E, counts_Z]),
        kept_slots=dispatched.kept_slots + counts_Z.sum(),
    )
