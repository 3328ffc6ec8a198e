"""The losses of a router and the load it makes, in two launches forward and one backward.

From plain PyTorch the same numbers take about sixty small launches, more than the whole expert
computation of a small model. Formulas: ``mb_kernels.router_losses.reference``.

Letters: T tokens, E experts.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.router_losses.reference import RouterLosses as RouterLosses
from mb_kernels.router_losses.reference import divisor
from mb_kernels.router_losses.reference import router_losses as reference_losses
from mb_kernels.router_losses.reference import router_losses_backward as reference_backward
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide, wide_dtype


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
    """Load-balancing loss, z-loss and load statistics of a router.

    Args:
        logits_TE: [T, E], the router's logits; aux_loss is differentiable in them alone.
        probs_TE: [T, E], their softmax as ``topk_softmax`` returns it, kept for the backward. None
            for sigmoids, where the logits are kept.
        tokens_per_expert_E: [E], slots routed to each expert, before capacity drops any.
        kept_slots: scalar, how many of those slots an expert computes (``bins.offsets_E1[-1]``).
        load_balancing_weight, z_weight: weights of the two losses in aux_loss.
        score_function: what the probabilities of the load-balancing loss and the entropy are:
            "softmax", or "sigmoid" of each logit divided by the sum over the experts.
        balance_counts_E: [E], the counts to balance if not ``tokens_per_expert_E``: those of the
            global batch.
        mask_T: bool [T], False for padding, which enters no loss; None: every token counts.
        num_tokens: the number, or scalar tensor, that sums over tokens are divided by, as a mean
            below 1 too; None: the tokens that count.
        slots: scalar, the slots that were meant for an expert; None: those of
            ``tokens_per_expert_E``. Kept ones are a share of them.

    Returns:
        Scalars on the device, fp32. Zero tokens give zeros.

    Raises:
        ValueError: shapes, dtypes or devices that do not match.
    """
    checks.require_constant(load_balancing_weight=load_balancing_weight, z_weight=z_weight)
    _check(logits_TE, probs_TE, score_function, mask_T)
    balance = tokens_per_expert_E if balance_counts_E is None else balance_counts_E
    if num_tokens is not None and not isinstance(num_tokens, Tensor):
        num_tokens = torch.full(
            (), num_tokens, dtype=wide_dtype(logits_TE), device=logits_TE.device
        )
    counts = {"tokens_per_expert_E": tokens_per_expert_E, "balance_counts_E": balance}
    scalars = {"kept_slots": kept_slots, "num_tokens": num_tokens, "slots": slots}
    _check_counts(logits_TE, counts, scalars)
    *losses, _, _ = torch.ops.mb.router_losses(
        logits_TE,
        probs_TE,
        balance,
        tokens_per_expert_E,
        kept_slots,
        mask_T,
        num_tokens,
        slots,
        float(load_balancing_weight),
        float(z_weight),
        score_function == "sigmoid",
    )
    return RouterLosses(*losses)


def _check(
    logits_TE: Tensor, probs_TE: Tensor | None, score_function: str, mask_T: Tensor | None
) -> None:
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"score_function: expected softmax or sigmoid; got {score_function!r}.")
    if (probs_TE is None) != (score_function == "sigmoid"):
        raise ValueError(
            "probs_TE: expected the softmax of logits_TE, or None with score_function='sigmoid'; "
            f"got {'None' if probs_TE is None else 'a tensor'} with {score_function!r}."
        )
    checks.require_floating("logits_TE", logits_TE)
    checks.require_device("logits_TE", logits_TE, probs_TE=probs_TE, mask_T=mask_T)
    if logits_TE.ndim != 2 or logits_TE.shape[1] == 0:
        raise ValueError(
            f"logits_TE: expected [tokens, experts], one expert at least; got "
            f"{tuple(logits_TE.shape)}. Flatten leading dimensions."
        )
    if probs_TE is not None:
        if probs_TE.shape != logits_TE.shape:
            raise ValueError(
                f"probs_TE: expected the shape {tuple(logits_TE.shape)} of logits_TE; got "
                f"{tuple(probs_TE.shape)}."
            )
        if probs_TE.dtype is not wide_dtype(logits_TE):
            raise ValueError(
                "probs_TE: expected float32, or float64 of logits in float64, as topk_softmax "
                f"returns it; got {probs_TE.dtype} for logits in {logits_TE.dtype}."
            )
    if mask_T is not None and (
        mask_T.dtype is not torch.bool or mask_T.shape != logits_TE.shape[:1]
    ):
        raise ValueError(
            f"mask_T: expected bool, one for each of {logits_TE.shape[0]} tokens; got "
            f"{mask_T.dtype} of shape {tuple(mask_T.shape)}."
        )


def _check_counts(
    logits_TE: Tensor, counts: dict[str, Tensor], scalars: dict[str, Tensor | None]
) -> None:
    kept, experts = scalars["kept_slots"], logits_TE.shape[1]
    if kept is None:
        raise ValueError(
            "kept_slots: expected how many slots an expert computes; got None. Pass "
            "bins.offsets_E1[-1]."
        )
    for name, scalar in scalars.items():
        if scalar is not None and not isinstance(scalar, Tensor):
            raise ValueError(
                f"{name}: expected a scalar tensor on {logits_TE.device}; got {scalar!r}. Make it "
                f"by torch.tensor({scalar!r}, device={str(logits_TE.device)!r})."
            )
        if scalar is not None and scalar.numel() != 1:
            raise ValueError(f"{name}: expected one number; got {tuple(scalar.shape)}.")
    checks.require_device("logits_TE", logits_TE, **scalars)
    checks.require_indices("logits_TE", logits_TE, **counts, kept_slots=kept)
    for name, numbers in counts.items():
        if numbers.shape != (experts,):
            raise ValueError(
                f"{name}: expected one count for each of {experts} experts; "
                f"got shape {tuple(numbers.shape)}."
            )


def _reference(
    logits: Tensor,
    probs: Tensor | None,
    balance_counts: Tensor,
    counts: Tensor,
    kept: Tensor,
    mask: Tensor | None,
    num_tokens: Tensor | None,
    slots: Tensor | None,
    balance_weight: float,
    z_weight: float,
    sigmoid: bool,
) -> tuple[Tensor, ...]:
    losses = reference_losses(
        logits,
        probs,
        counts,
        kept.reshape(()),
        load_balancing_weight=balance_weight,
        z_weight=z_weight,
        score_function="sigmoid" if sigmoid else "softmax",
        balance_counts_E=balance_counts,
        mask_T=mask,
        num_tokens=num_tokens,
        slots=slots,
    )
    lse = torch.logsumexp(wide(logits), dim=-1)
    return *losses, lse, divisor(logits, mask, num_tokens)


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    scalars = (logits.new_empty((), dtype=wide_dtype(logits)) for _ in RouterLosses._fields)
    lse = logits.new_empty(logits.shape[0], dtype=wide_dtype(logits))
    return *scalars, lse, lse.new_empty(())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, probs, balance_counts, _, _, mask, _, _, *ctx.options = inputs
    ctx.logits_dtype = logits.dtype
    kept = logits if probs is None else probs
    ctx.save_for_backward(kept, balance_counts, *output[-2:], mask)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros for the outputs without a gradient


def _backward(ctx: Any, d_aux: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if d_aux is None:
        return (None,) * 11
    d_logits = torch.ops.mb.router_losses_backward(d_aux, *ctx.saved_tensors, *ctx.options)
    return d_logits.to(ctx.logits_dtype), *(None,) * 10


registration.register(
    "router_losses(Tensor logits, Tensor? probs, Tensor balance_counts, Tensor counts, "
    "Tensor kept, Tensor? mask, Tensor? num_tokens, Tensor? slots, float balance_weight, "
    "float z_weight, bool sigmoid) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    kernels="mb_kernels.router_losses.kernels",
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
)
registration.register(
    "router_losses_backward(Tensor d_aux, Tensor kept, Tensor balance_counts, Tensor lse, "
    "Tensor divisor, Tensor? mask, float balance_weight, float z_weight, bool sigmoid) -> Tensor",
    reference=reference_backward,
    kernels="mb_kernels.router_losses.kernels",
    fake=lambda d_aux, kept, *_: kept.new_empty(kept.shape, dtype=wide_dtype(kept)),
)
