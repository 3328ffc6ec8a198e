"""Cross entropy of a language model's head that never keeps the logits.

Logits exist for one slice of tokens at a time (see `slices`). Gradients are computed with the loss
in the forward pass, and only scaled in the backward. The vocabulary may be spread over ranks: each
has a run of rows of the weight, and the ranks exchange three numbers per token.

Letters: T tokens, R tokens of a slice, P ranks, D hidden, V vocabulary or this rank's share of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mb_kernels.exporting import transforms_active
from mb_kernels.linear_cross_entropy import reference, slices
from mb_kernels.linear_cross_entropy.slices import Needs, scaled
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide_dtype

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's place in a vocabulary that is spread over ranks.

    start: the label that the first row of this rank's weight stands for.
    size: the whole vocabulary.
    gather: brings [R, 3] of each rank to all of them, [P, R, 3]; called once per slice, in the same
        order on every rank.
    """

    start: int
    size: int
    gather: Callable[[Tensor], Tensor]


def linear_cross_entropy(
    x: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    bias_V: Tensor | None = None,
    reduction: str = "mean",
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Cross entropy of `x @ weight_VD^T + bias_V` against `labels`, without keeping the logits.

    Args:
        x: hidden states [..., D], any floating dtype: products are computed in it, losses in fp32.
        weight_VD, bias_V: fp32 or the dtype of x; their gradients are summed up in fp32.
        labels: [...], integers in [0, V). A negative label (-1, -100) is ignored: it adds no loss
            and no gradient, even if its hidden state or its weight is NaN. One of V or more makes
            the loss NaN.
        weights: [...], what each token's loss counts; None: 1. Has no gradient.
        reduction: "mean", sum(weights * losses) / sum(weights) over the tokens with a label (0 if
            there is none); "sum", the numerator alone; "none", each token's loss, unweighted and
            without gradient, in the shape of `labels`.
        shard: `weight_VD` and `bias_V` are this rank's share of the vocabulary; the result is that
            of all of it, on every rank. The gradient of x is this rank's part: add them up.

    Returns:
        The loss in nats, fp32 (fp64 if x is).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; under MB_DEBUG=1 a label of no class.
        RuntimeError: a gradient is taken with `create_graph`, for a second derivative.
    """
    _check(x, weight_VD, labels, weights, bias_V, reduction, shard)
    x_TD, labels_T = x.reshape(labels.numel(), x.shape[-1]), labels.reshape(-1).long().contiguous()
    wide = wide_dtype(x)
    valid_T = labels_T >= 0
    weights_T = valid_T.to(wide)
    if weights is not None:
        weights_T = torch.where(valid_T, weights.detach().reshape(-1).to(wide), 0)
    if reduction == "none":
        with torch.no_grad():
            _, losses_T = _totals(x_TD, weight_VD, bias_V, labels_T, weights_T, shard)
        return losses_T.view(labels.shape)
    # Gradients are kept in x's dtype relative to the largest weight: fp16 holds no 1 / (B S).
    unit = torch.ones((), dtype=wide, device=x.device)
    if weights is not None and weights_T.numel():
        unit = weights_T.abs().amax()
        unit = torch.where(unit > 0, unit, 1.0)
    total, _ = _totals(x_TD, weight_VD, bias_V, labels_T, weights_T / unit, shard)
    total = total * unit
    if reduction == "sum":
        return total
    return total / reference.divisor(weights_T)


def _check(
    x: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    bias_V: Tensor | None,
    reduction: str,
    shard: VocabularyShard | None,
) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}; got {reduction!r}.")
    checks.require_floating("x", x)
    checks.require_floating("weight_VD", weight_VD)
    checks.require_dense("labels", labels)
    if bias_V is not None:
        checks.require_floating("bias_V", bias_V)
    checks.require_device(
        "x", x, weight_VD=weight_VD, labels=labels, weights=weights, bias_V=bias_V
    )
    if weights is not None and (weights.is_floating_point() or weights.is_complex()):
        checks.require_floating("weights", weights)  # a mask of integers or booleans will do
    if x.ndim == 0:
        raise ValueError("x: expected [..., D], one dimension at least; got ().")
    if weight_VD.ndim != 2 or weight_VD.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight_VD: expected [V, {x.shape[-1]}] for x of shape {tuple(x.shape)}; "
            f"got {tuple(weight_VD.shape)}."
        )
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != x.shape[:-1] or not integers:
        raise ValueError(
            f"labels: expected integers of shape {tuple(x.shape[:-1])}, one per token; "
            f"got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights: expected shape {tuple(labels.shape)}, one per label; "
            f"got {tuple(weights.shape)}."
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(
            f"bias_V: expected shape {tuple(weight_VD.shape[:1])}, one per row of weight_VD; "
            f"got {tuple(bias_V.shape)}."
        )
    if shard is None and weight_VD.shape[0] == 0:
        raise ValueError("weight_VD: expected a row for each label, one at least; got none.")
    if shard is not None and not 0 <= shard.start <= shard.size - weight_VD.shape[0]:
        raise ValueError(
            f"shard: expected {weight_VD.shape[0]} rows from {shard.start} on to lie within a "
            f"vocabulary of {shard.size}."
        )


def _totals(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    weights_T: Tensor,
    shard: VocabularyShard | None,
) -> tuple[Tensor, Tensor]:
    """sum(weights losses), differentiable, and losses_T."""
    inputs = (x_TD, weight_VD, bias_V)
    grad = torch.is_grad_enabled()
    # Within vmap no tensor tells whether it requires a gradient.
    all_of_them = not torch.compiler.is_compiling() and transforms_active()
    needs = Needs(*(grad and t is not None and (t.requires_grad or all_of_them) for t in inputs))
    if shard is None:
        total, losses_T, *_ = torch.ops.mb.linear_cross_entropy(
            *inputs, labels_T, weights_T, *needs
        )
        return total, losses_T
    if registration.debugging(labels_T):
        _check_labels(labels_T, shard.size)
    return _Sharded.apply(*inputs, labels_T, weights_T, needs, shard)


class _Sharded(torch.autograd.Function):
    """The op for a share of the vocabulary: its exchange is a function, no argument of an op."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, weights_T, needs, shard = inputs
        finish = _finish_shard(shard, needs)
        with registration.device_of(weights_T), registration.without_autocast(weights_T):
            losses_T, *grads = slices.run(*tensors, weights_T, needs, finish, vocabulary=shard.size)
        total = (losses_T * weights_T).sum()
        _save(ctx, inputs, (total, losses_T, *grads))
        ctx.mark_non_differentiable(losses_T)
        return total, losses_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grads[0]), None, None, None, None


def _finish_shard(shard: VocabularyShard, needs: Needs) -> slices.Finish:
    """What ends each slice: the ranks' sums put together, each rank's gradient from these."""

    def finish(logits_RV: Tensor, labels_R: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        if registration.use_triton(logits_RV):
            from mb_kernels.linear_cross_entropy import kernels as steps
        else:
            steps = reference
        if logits_RV.shape[1]:
            statistics_R3 = steps.row_statistics(logits_RV, labels_R, shard.start)
        else:  # no label is this rank's
            nothing = logits_RV.new_tensor([-torch.inf, 0, 0], dtype=weights_R.dtype)
            statistics_R3 = nothing.repeat(len(labels_R), 1)
        parts_PR3 = shard.gather(statistics_R3)
        peaks_PR, totals_PR, scores_PR = parts_PR3.unbind(2)
        peak_R = peaks_PR.amax(0)
        total_R = (totals_PR * (peaks_PR - peak_R).exp()).sum(0).log()
        losses_R = torch.where(labels_R >= 0, total_R + (peak_R - scores_PR.sum(0)), 0)
        if any(needs) and logits_RV.shape[1]:
            norms = (peak_R, total_R)
            logits_RV = steps.row_gradients(logits_RV, labels_R, *norms, weights_R, shard.start)
        return losses_R, logits_RV

    return finish


def _reference(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    weights_T: Tensor,
    *needs: bool,
) -> tuple[Tensor, ...]:
    # The whole vocabulary is the share of one rank.
    whole = VocabularyShard(0, weight_VD.shape[0], gather=lambda statistics_R3: statistics_R3[None])
    finish = _finish_shard(whole, Needs(*needs))
    # Tokens without a label cost nothing here; a kernel would have to ask how many there are.
    (counted_R,) = (labels_T >= 0).nonzero(as_tuple=True)
    x_RD, labels_R, weights_R = (t[counted_R] for t in (x_TD, labels_T, weights_T))
    losses_R, dx_RD, *grads = slices.run(
        x_RD, weight_VD, bias_V, labels_R, weights_R, Needs(*needs), finish
    )
    losses_T = losses_R.new_zeros(len(labels_T)).index_copy(0, counted_R, losses_R)
    if needs[0]:
        dx_RD = torch.zeros_like(x_TD).index_copy(0, counted_R, dx_RD)
    return (losses_R * weights_R).sum(), losses_T, dx_RD, *grads


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor, *needs: bool
) -> tuple[Tensor, ...]:
    wide = wide_dtype(x)
    kinds = ((x.shape, x.dtype), (weight.shape, wide), (weight.shape[:1], wide))
    grads = (
        x.new_empty(shape, dtype=dtype) if need else x.new_empty(0)
        for need, (shape, dtype) in zip(needs, kinds, strict=True)
    )
    return x.new_empty((), dtype=wide), x.new_empty(x.shape[0], dtype=wide), *grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight_VD, bias_V, *_ = inputs
    ctx.save_for_backward(*output[2:])
    ctx.dtypes = (weight_VD.dtype, None if bias_V is None else bias_V.dtype)
    ctx.set_materialize_grads(False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(
    ctx: Any, d_total: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if d_total is None:  # a Function behind the loss returned no gradient
        return None, None, None
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivative: its gradients are computed with the "
            "loss. Leave out create_graph, or use mb_kernels.reference.linear_cross_entropy."
        )
    dx_TD, dw_VD, db_V = ctx.saved_tensors
    needs = ctx.needs_input_grad
    weight_dtype, bias_dtype = ctx.dtypes
    return (
        scaled(dx_TD, d_total) if needs[0] else None,
        scaled(dw_VD, d_total).to(weight_dtype) if needs[1] else None,
        scaled(db_V, d_total).to(bias_dtype) if needs[2] else None,
    )


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grads[0]), None, None, None, None, None


def _check_labels(labels_T: Tensor, vocabulary: int) -> None:
    if labels_T.numel() and int(labels_T.max()) >= vocabulary:
        at = int((labels_T >= vocabulary).nonzero()[0])
        raise ValueError(
            f"labels: expected each below the vocabulary, {vocabulary}, or negative to be ignored; "
            f"got {int(labels_T[at])} for token {at}."
        )


def _flops(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    bias: Any,
    labels: Any,
    weights: Any,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    **_: Any,
) -> int:
    return 2 * math.prod(x) * weight[0] * (1 + need_x + need_weight)


registration.register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor weights, "
    "bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    kernels="mb_kernels.linear_cross_entropy.kernels",
    fake=_fake,
    flops=_flops,
    setup_context=_setup,
    backward=_backward,
    debug_check=lambda x, weight, bias, labels, *_: _check_labels(labels, weight.shape[0]),
)
