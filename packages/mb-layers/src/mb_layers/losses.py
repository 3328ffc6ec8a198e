"""Auxiliary losses of the router: returned, never stored.

The load-balancing loss is MegaBlocks' (Switch Transformer, arXiv 2101.03961, eq. 4, for any top-k):

    E / (K T) * sum_e n_e * mean_t p_te

with n_e the slots routed to expert e and p_te the router's probabilities. It is 1 when the experts'
load is equal. It is also near 1 when all probabilities are near 1/E, whatever the load: to see how
even the load is, look at the metric `load_imbalance`. A model's auxiliary loss is the mean over its
MoE layers of the weighted losses. Switch has the sum, so alpha for L layers is alpha / L there.

The load n_e is counted over what `MoEConfig.balance_over` says. The counts carry no gradient, and
the loss is linear in p, so the mean over micro-batches and ranks of

    E / (K T_global) * sum_e n_e^global * mean_t p_te^local

is the loss of the global batch exactly (arXiv 2501.11873): only counts are exchanged.

The z-loss (ST-MoE, arXiv 2202.08906, eq. 5) is the mean of logsumexp(logits)^2.

These are the definitions. A layer gets the same numbers from `mb_kernels.router_losses`, in three
launches, where that is possible.

Letters: T tokens, E experts, K top-k, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mb_kernels.exporting import is_exporting
from torch import Tensor

from mb_layers import arguments
from mb_layers.tensors import at_least_fp32, without_autocast


def load_balancing_loss(
    probs_TE: Tensor,
    tokens_per_expert_E: Tensor,
    *,
    mask_T: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Return the unweighted load-balancing loss, an fp32 scalar; 1.0 when balanced.

    Args:
        probs_TE: the router's probabilities [T, E], with gradient. Rows sum to 1.
        tokens_per_expert_E: routed slots per expert, before capacity drops any. They may count
            more tokens than `probs_TE` has (the global batch): only their proportions matter.
        mask_T, num_tokens: see `mb_layers.losses.mean_over_tokens`.

    Zero tokens give 0.

    Raises:
        ValueError: `probs_TE` is no matrix, or `tokens_per_expert_E` does not have E counts.
    """
    _check_dims("probs_TE", probs_TE, 2)
    num_experts = probs_TE.shape[1]
    counts = tokens_per_expert_E
    if not isinstance(counts, Tensor) or counts.shape != (num_experts,):
        raise ValueError(
            f"expected tokens_per_expert_E of shape ({num_experts},), one count per column of "
            f"probs_TE, got {arguments.described(counts)}"
        )
    probs_TE = at_least_fp32(probs_TE)
    counts_E = counts.detach().to(probs_TE.dtype)
    mean_probs_E = mean_over_tokens(probs_TE, mask_T, num_tokens)
    load_E = counts_E / counts_E.sum().clamp(min=1)
    return num_experts * (mean_probs_E * load_E).sum()


def sequence_load_balancing_loss(
    probs_BSE: Tensor,
    expert_ids_BSK: Tensor,
    *,
    mask_BS: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
    reduce_counts: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the mean over sequences of each sequence's load-balancing loss, an fp32 scalar.

    DeepSeek-V3's complementary loss (arXiv 2412.19437, eq. 17 to 20), in the scale of
    `load_balancing_loss`: it is 1.0 when every sequence is balanced within itself. With a mask a
    sequence weighs as much as it has valid tokens. Its eq. 18 counts the best K scores, as a
    layer does with `balance_by="scores"`.

    Args:
        probs_BSE: the router's probabilities [B, S, E], with gradient.
        expert_ids_BSK: the chosen experts [B, S, K], any integer dtype; an id that is no expert's
            counts nowhere.
        mask_BS, num_tokens: see `mean_over_tokens`.
        reduce_counts: where these are parts of sequences, adds up counts [B, E] over the ranks that
            have the others. Then the mean of the ranks' results is the loss of whole sequences.

    Raises:
        ValueError: `probs_BSE`, `expert_ids_BSK` or `mask_BS` of another kind or shape.
    """
    _check_dims("probs_BSE", probs_BSE, 3)
    ids = expert_ids_BSK
    integers = isinstance(ids, Tensor) and not (
        ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    )
    if not integers or ids.shape[:-1] != probs_BSE.shape[:-1]:
        raise ValueError(
            f"expected integer expert_ids_BSK of shape {(*probs_BSE.shape[:-1], 'K')}, one row per "
            f"row of probs_BSE, got {arguments.described(ids)}"
        )
    num_sequences, length, num_experts = probs_BSE.shape
    probs_BSE = at_least_fp32(probs_BSE)
    ids_BN = expert_ids_BSK.reshape(num_sequences, length * expert_ids_BSK.shape[-1]).long()
    if mask_BS is not None:
        mask_BS = arguments.as_mask(mask_BS, probs_BSE.shape[:-1], name="mask_BS")
        chosen_BSK = mask_BS[..., None].expand_as(expert_ids_BSK)
        ids_BN = torch.where(chosen_BSK.reshape(ids_BN.shape), ids_BN, -1)
    ids_BN = torch.where((ids_BN >= 0) & (ids_BN < num_experts), ids_BN, num_experts)
    counts_BE = probs_BSE.new_zeros(num_sequences, num_experts + 1)
    counts_BE = counts_BE.scatter_add(1, ids_BN, counts_BE.new_ones(()).expand_as(ids_BN))[:, :-1]
    if reduce_counts is not None:
        counts_BE = reduced(counts_BE, reduce_counts)
    load_BE = counts_BE / counts_BE.sum(dim=1, keepdim=True).clamp(min=1)
    with without_autocast(probs_BSE):  # it would round the product to 16 bits
        loads_BS = num_experts * torch.linalg.vecdot(probs_BSE, load_BE[:, None, :])
    mask_T = None if mask_BS is None else mask_BS.reshape(-1)
    return mean_over_tokens(loads_BS.reshape(-1), mask_T, num_tokens)


def z_loss(
    logits_TE: Tensor, *, mask_T: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> Tensor:
    """Return the unweighted router z-loss, mean_t logsumexp_e(logits)^2, an fp32 scalar.

    It keeps logits small, which keeps a low-precision router stable. Zero tokens give 0; for
    `mask_T` and `num_tokens` see `mb_layers.losses.mean_over_tokens`.

    Raises:
        ValueError: `logits_TE` is no matrix.
    """
    _check_dims("logits_TE", logits_TE, 2)
    lse_T = torch.logsumexp(at_least_fp32(logits_TE), dim=-1)
    return mean_over_tokens(lse_T.square(), mask_T, num_tokens)


def entropy(
    probs_TE: Tensor, *, mask_T: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> Tensor:
    """Return the mean entropy of the rows in nats, an fp32 scalar. Zero tokens give 0."""
    entropy_T = torch.special.entr(at_least_fp32(probs_TE)).sum(dim=-1)
    return mean_over_tokens(entropy_T, mask_T, num_tokens)


def _check_dims(name: str, values: Tensor, dims: int) -> None:
    arguments.floating(**{name: values})
    if values.dim() != dims:
        raise ValueError(f"expected {name} of {dims} dimensions, got {tuple(values.shape)}")


def mean_over_tokens(
    values: Tensor, mask_T: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> Tensor:
    """Return the mean of `values` [T, ...] over the tokens, without a host sync; 0 for none.

    Args:
        mask_T: bool or integer [T], nonzero for the tokens that count. None: all of them.
        num_tokens: divide by this many tokens, a number or a scalar tensor; None: by those that
            count. On each of R data-parallel ranks, with the valid tokens of all of them over R,
            the mean of the ranks' results is the mean over all tokens, however uneven their share.

    Raises:
        ValueError: a mask of another kind or shape, no number of tokens.
    """
    num_tokens = arguments.one_number(num_tokens, name="num_tokens")
    if mask_T is not None:
        mask_T = arguments.as_mask(mask_T, values.shape[:1], name="mask_T")
        values = torch.where(mask_T.view(-1, *(1,) * (values.dim() - 1)), values, 0)
        num_tokens = mask_T.sum() if num_tokens is None else num_tokens
    if num_tokens is None:
        num_tokens = values.shape[0]
    if isinstance(num_tokens, Tensor):  # a mean over ranks may be below 1, a NaN shall be seen
        divisor = torch.where(num_tokens == 0, 1, num_tokens)
        return values.sum(dim=0) / divisor.to(values.dtype)  # a scalar's would be the result's
    return values.sum(dim=0) / (num_tokens if num_tokens > 0 else 1)


def reduced(counts: Tensor, reduce_counts: Callable[[Tensor], Tensor]) -> Tensor:
    """The counts [..., E] of all ranks, which the backward pass may read.

    `reduce_counts` may change the tensor that it is given, and later add to the one it returned.
    """
    total = reduce_counts(counts.clone())
    if not isinstance(total, Tensor) or total.shape != counts.shape:
        raise ValueError(
            f"expected reduce_counts to return counts of shape {tuple(counts.shape)}, got "
            f"{arguments.described(total)}; torch.distributed.all_reduce adds up in place: return "
            "the tensor behind it"
        )
    return total.clone()


def attach_aux_loss(y: Tensor, aux_loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return `y`, through which the backward pass also starts at `scale * aux_loss`.

    For code that cannot return a second output, such as a pipeline stage: the gradients are those
    of `loss + scale * aux_loss`, although `aux_loss` is never added to the loss. `scale` must hold
    whatever factor the trainer gives its loss (1 / number of micro-batches, the fp16 loss scale).

    Args:
        y: any tensor whose gradient will be asked for. Returned unchanged, as a view: autograd lets
            nobody write into it, so `x = x + y` behind it, not `y += x`.
        aux_loss: a scalar with gradient, as in `MoEOutput.aux_loss`.
        scale: a number, or a scalar tensor, which must not be written to before the backward pass.

    Raises:
        ValueError: `y` can have no gradient; `aux_loss` or `scale` is not a scalar; a `scale` that
            requires a gradient; an `aux_loss` with a gradient within torch.export, whose programs
            cannot hold what starts at a second loss.
    """
    if not isinstance(y, Tensor) or not (y.is_floating_point() or y.is_complex()):
        raise ValueError(f"expected y to be a tensor with gradient, got {arguments.described(y)}")
    if not isinstance(aux_loss, Tensor) or aux_loss.numel() != 1:
        is_tensor = isinstance(aux_loss, Tensor)
        got = f"shape {tuple(aux_loss.shape)}" if is_tensor else repr(aux_loss)
        raise ValueError(f"expected a scalar aux_loss, got {got}")
    if isinstance(scale, Tensor):
        if scale.numel() != 1:
            raise ValueError(f"expected a scalar scale, got shape {tuple(scale.shape)}")
        if scale.requires_grad:  # the loss has no place in a graph that this would be a part of
            raise ValueError(
                "expected a scale without gradient, got one that requires it; add scale * aux_loss "
                "to the loss instead, or detach it"
            )
    else:
        arguments.finite(scale=scale)
        scale = torch.full((), scale, device=aux_loss.device, dtype=aux_loss.dtype)
    if is_exporting():  # a saved program holds no function of ours
        if aux_loss.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "expected an aux_loss without gradient within torch.export, whose program would "
                "train without it: return aux_loss beside y, or export in eval mode"
            )
        return y
    return _AttachAuxLoss.apply(y, aux_loss, scale)


class _AttachAuxLoss(torch.autograd.Function):
    """Identity in y; hands `scale` to aux_loss as its gradient."""

    @staticmethod
    def forward(y: Tensor, aux_loss: Tensor, scale: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        _, aux_loss, scale = inputs
        ctx.save_for_backward(scale)
        ctx.aux_shape, ctx.aux_dtype = aux_loss.shape, aux_loss.dtype

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:  # ty: ignore[incompatible-method-override]
        (scale,) = ctx.saved_tensors
        # A copy: a leaf makes the tensor that it is handed its `grad`, and adds to it later.
        return grad_y, scale.to(ctx.aux_dtype, copy=True).reshape(ctx.aux_shape), None
