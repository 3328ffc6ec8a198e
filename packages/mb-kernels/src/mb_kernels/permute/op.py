"""Tokens to rows sorted by expert (``gather``) and back (``combine``).

``combine`` sums a token's K rows in fp32 in slot order: deterministic, no atomics. The two are each
other's backward: the gradient of a gather is an unweighted combine.

Letters: T tokens, D hidden, K top-k, N = T·K rows, E1 = E + 1 experts plus one.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.bins import Bins
from mb_kernels.permute import reference
from mb_kernels.runtime import checks, registration


def gather(x_TD: Tensor, bins: Bins, top_k: int) -> Tensor:
    """Copy tokens into rows sorted by expert.

    Args:
        x_TD: [T, D].
        bins: of T·top_k slots, from ``bin_tokens`` or padded by ``pad_bins``: then of R rows.
        top_k: K.

    Returns:
        rows_ND [N, D], or [R, D], in the dtype of x_TD; rows of dropped slots and padding are zero.
        Differentiable, twice too.

    Raises:
        ValueError: bins do not hold T·top_k slots; a dtype or device that does not fit.
    """
    checks.require_floating("x_TD", x_TD)
    checks.require_bins("x_TD", x_TD, bins)
    if x_TD.ndim != 2:
        raise ValueError(f"x_TD: expected [T, D]; got {tuple(x_TD.shape)}. Flatten it.")
    checks.require_integer(top_k=top_k)
    _check_slots(bins, x_TD.shape[0], top_k, "x_TD")
    return torch.ops.mb.gather(x_TD, *_indices(bins), top_k)


def combine(rows_ND: Tensor, bins: Bins, weights_TK: Tensor) -> Tensor:
    """Sum each token's K rows, weighted.

    Args:
        rows_ND: [N, D], or [R, D] for padded bins.
        bins: of T·K slots.
        weights_TK: [T, K], normally fp32.

    Returns:
        y_TD [T, D] in the dtype of rows_ND, summed in fp32 in slot order; dropped slots add
        nothing. Differentiable in rows_ND and weights_TK.

    Raises:
        ValueError: rows or bins do not hold T·K slots; a dtype or device that does not fit.
    """
    checks.require_floating("rows_ND", rows_ND)
    checks.require_floating("weights_TK", weights_TK)
    checks.require_device("rows_ND", rows_ND, weights_TK=weights_TK)
    checks.require_bins("rows_ND", rows_ND, bins)
    if weights_TK.ndim != 2:
        raise ValueError(f"weights_TK: expected [T, K]; got {tuple(weights_TK.shape)}.")
    _check_slots(bins, weights_TK.shape[0], weights_TK.shape[1], "weights_TK")
    if rows_ND.ndim != 2 or rows_ND.shape[0] != bins.order_N.numel():
        raise ValueError(
            f"rows_ND: expected [{bins.order_N.numel()}, D], a row for each entry of bins.order_N; "
            f"got {tuple(rows_ND.shape)}. Pass rows in that order."
        )
    return torch.ops.mb.combine(rows_ND, *_indices(bins), weights_TK, weights_TK.shape[1])


def _check_slots(bins: Bins, tokens: int, top_k: int, what: str) -> None:
    if bins.inverse_N.numel() != tokens * top_k or top_k < 1:
        raise ValueError(
            f"bins: expected {tokens * top_k} slots, {what}'s {tokens} tokens times top_k "
            f"{top_k}; got {bins.inverse_N.numel()}. Build them from ids [T, top_k]."
        )


def _indices(bins: Bins) -> tuple[Tensor, ...]:
    return checks.int32(bins.order_N, bins.inverse_N, bins.offsets_E1)


def bins_of(order: Tensor, inverse: Tensor, offsets: Tensor) -> Bins:
    """Bins from the three arrays ops pass around; the counts are those after capacity."""
    return Bins(order, inverse, offsets.diff(), offsets)


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, inverse, offsets, ctx.top_k = inputs
    ctx.save_for_backward(order, inverse, offsets)


def _gather_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.mb.combine(d_rows, *ctx.saved_tensors, None, ctx.top_k)
    return dx, None, None, None, None


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, order, inverse, offsets, weights, ctx.top_k = inputs
    ctx.save_for_backward(rows, order, inverse, offsets, weights)


def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows, order, inverse, offsets, weights = ctx.saved_tensors
    if weights is None:
        d_rows, d_weights = torch.ops.mb.gather(dy, order, inverse, offsets, ctx.top_k), None
    else:
        d_rows, d_weights = torch.ops.mb.combine_backward(
            dy, rows, order, inverse, offsets, weights
        )
    return d_rows, None, None, None, d_weights, None


def _combine_fake(
    rows: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    top_k: int,
) -> Tensor:
    return rows.new_empty((inverse.shape[0] // top_k, rows.shape[1]))


registration.register(
    "gather(Tensor x, Tensor order, Tensor inverse, Tensor offsets, int top_k) -> Tensor",
    reference=lambda x, order, inverse, offsets, top_k: reference.gather(
        x, bins_of(order, inverse, offsets), top_k
    ),
    kernels="mb_kernels.permute.kernels",
    fake=lambda x, order, inverse, offsets, top_k: x.new_empty((order.shape[0], x.shape[1])),
    setup_context=_gather_setup,
    backward=_gather_backward,
    differentiable_twice=True,
    debug_check=lambda x, order, inverse, offsets, top_k: checks.debug_offsets(
        offsets, order.shape[0]
    ),
)
registration.register(
    "combine(Tensor rows, Tensor order, Tensor inverse, Tensor offsets, Tensor? weights, "
    "int top_k) -> Tensor",
    reference=lambda rows, order, inverse, offsets, weights, top_k: reference.combine(
        rows, bins_of(order, inverse, offsets), weights, top_k
    ),
    kernels="mb_kernels.permute.kernels",
    fake=_combine_fake,
    setup_context=_combine_setup,
    backward=_combine_backward,
    debug_check=lambda rows, order, inverse, offsets, *_: checks.debug_offsets(
        offsets, order.shape[0]
    ),
)
registration.register(
    "combine_backward(Tensor dy, Tensor rows, Tensor order, Tensor inverse, Tensor offsets, "
    "Tensor weights) -> (Tensor, Tensor)",
    reference=lambda dy, rows, order, inverse, offsets, weights: reference.combine_backward(
        dy, rows, bins_of(order, inverse, offsets), weights
    ),
    kernels="mb_kernels.permute.kernels",
    fake=lambda dy, rows, order, inverse, offsets, weights: (
        rows.new_empty(rows.shape),
        weights.new_empty(weights.shape),
    ),
)
