"""What a layer reports of its routing: the weighted auxiliary loss and the metrics.

If the load is balanced over micro-batches or the global batch, `mb_kernels.router_losses` computes
all of it in three launches, with padding too. Everything else (balance over sequences, a router of
the user's own) takes the definitions in `mb_layers.losses`.

Letters: T tokens, E experts, K top-k, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mb_kernels
import torch
from mb_kernels import RouterLosses
from torch import Tensor

from mb_layers import arguments
from mb_layers.config import MoEConfig, ScoreFunction
from mb_layers.dispatch import Dispatched
from mb_layers.losses import (
    entropy,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from mb_layers.router import RouterOutput


def router_losses(
    config: MoEConfig,
    routed: RouterOutput,
    dispatched: Dispatched,
    shape: torch.Size,
    *,
    balance_counts_E: Tensor,
    reduce_counts: Callable[[Tensor], Tensor] | None = None,
    mask_T: Tensor | None,
    num_tokens: Tensor | float | None,
    score_function: ScoreFunction | None,
    ids_are_experts: bool,
) -> RouterLosses:
    """Return the losses and load statistics of one forward pass, fp32 scalars.

    Only aux_loss has a gradient.

    Args:
        config: of the layer.
        routed, dispatched: what its router decided and its dispatcher made of it.
        shape: of the layer's input, whose dimension `config.sequence_dim` is the sequence.
        balance_counts_E: slots per expert to balance, of the micro-batch or the global batch.
        reduce_counts: adds up those of sequences, for `balance_over="sequence"`.
        mask_T: bool [T], the tokens that count; None: all.
        num_tokens: what the losses are divided by; None: the tokens that count.
        score_function: what `routed.probs_TE` are of the logits; None: something else.
        ids_are_experts: whether every id is an expert's, or -1 for padding. Otherwise the slots
            that were meant for an expert have to be counted.
    """
    num_tokens = arguments.one_number(num_tokens, name="valid_tokens")
    # An id that no expert has, other than -1, was meant for one: its slot counts as dropped.
    slots = None if ids_are_experts else (routed.expert_ids_TK != -1).sum()
    if score_function is not None and config.balance_over != "sequence":
        assert routed.probs_TE is not None
        assert routed.logits_TE is not None
        is_softmax = score_function == "softmax"
        return mb_kernels.router_losses(
            routed.logits_TE,
            routed.probs_TE.detach() if is_softmax else None,
            dispatched.tokens_per_expert_E,
            dispatched.kept_slots,
            load_balancing_weight=config.load_balancing_loss_weight,
            z_weight=config.z_loss_weight,
            score_function=score_function,
            balance_counts_E=balance_counts_E,
            mask_T=mask_T,
            num_tokens=num_tokens,
            slots=slots,
        )
    counts_E, probs_TE = dispatched.tokens_per_expert_E, routed.probs_TE
    over = {"mask_T": mask_T, "num_tokens": num_tokens}
    # Numbers of their own, since they become metrics, which a caller may add up in place.
    balance, z, mean_entropy = torch.zeros(3, dtype=torch.float32, device=counts_E.device).unbind()
    if probs_TE is not None:
        mean_entropy = entropy(probs_TE.detach(), **over)
        if config.balance_over == "sequence":
            balance = _sequence_balance(config, routed, probs_TE, shape, reduce_counts, **over)
        else:
            balance = load_balancing_loss(probs_TE, balance_counts_E, **over)
    if routed.logits_TE is not None:
        z = z_loss(routed.logits_TE, **over)
    slots = (counts_E.sum() if slots is None else slots).to(balance.dtype)
    weighted = ((config.load_balancing_loss_weight, balance), (config.z_loss_weight, z))
    nothing = torch.zeros_like(balance)
    return RouterLosses(
        # One of no weight adds nothing, be it infinite, as z is where a logit is 2e19.
        aux_loss=sum((weight * loss for weight, loss in weighted if weight), start=nothing),
        load_balancing_loss=balance.detach(),
        z_loss=z.detach(),
        router_entropy=mean_entropy,
        load_imbalance=counts_E.max().to(slots.dtype) * counts_E.shape[0] / slots.clamp(min=1),
        dropped_fraction=(slots - dispatched.kept_slots) / slots.clamp(min=1),
    )


def _sequence_balance(
    config: MoEConfig,
    routed: RouterOutput,
    probs_TE: Tensor,
    shape: torch.Size,
    reduce_counts: Callable[[Tensor], Tensor] | None,
    *,
    mask_T: Tensor | None,
    num_tokens: Tensor | float | None,
) -> Tensor:
    if routed.token_ids_N is not None:
        raise ValueError(
            "expected a router that chooses experts for tokens with balance_over='sequence', got "
            "one that chooses tokens for experts"
        )
    mask_BS = None
    if mask_T is not None:
        mask_BS = _by_sequence(mask_T[:, None], shape, config.sequence_dim)[..., 0]
    balanced_TK = routed.balanced_ids_TK
    ids_TK = routed.expert_ids_TK if balanced_TK is None else balanced_TK
    return sequence_load_balancing_loss(
        _by_sequence(probs_TE, shape, config.sequence_dim),
        _by_sequence(ids_TK, shape, config.sequence_dim),
        mask_BS=mask_BS,
        num_tokens=num_tokens,
        reduce_counts=reduce_counts,
    )


def _by_sequence(values_TM: Tensor, shape: torch.Size, sequence_dim: int) -> Tensor:
    """[T, M] to [B, S, M], the tokens being the leading dimensions of an input of `shape`."""
    width = values_TM.shape[-1]
    if len(shape) == 1:
        return values_TM.view(1, 1, width)
    if not -len(shape) <= sequence_dim < len(shape) - 1:
        raise ValueError(
            f"expected sequence_dim to be a leading dimension of x of shape {tuple(shape)}, "
            f"got {sequence_dim}; -2 is S of [B, S, D], 0 that of [S, B, D]"
        )
    by_dims = values_TM.view(*shape[:-1], width).movedim(sequence_dim, -2)
    batch = math.prod(by_dims.shape[:-2])
    return by_dims.reshape(batch, by_dims.shape[-2], width)
