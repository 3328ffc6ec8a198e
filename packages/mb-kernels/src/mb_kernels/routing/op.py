"""From router logits to ``Bins``: which tokens each expert computes, without a host sync.

``topk_softmax`` turns logits into routing weights, and ``topk_ids`` chooses by scores of any kind;
``bin_tokens`` sorts the chosen slots by expert, stably, so that every expert's rows are contiguous
(MegaBlocks' "bins", arXiv:2211.15841).

Letters: T tokens, E experts, K top-k, N = T·K slots, E1 = E + 1.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.bins import Bins as Bins
from mb_kernels.routing import reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide_dtype


def topk_softmax(
    logits_TE: Tensor, k: int, *, renormalize: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the experts and its k largest entries per token.

    Args:
        logits_TE: [T, E], fp32, bf16 or fp16; the arithmetic is fp32.
        k: experts per token, 1 to E.
        renormalize: divide the weights by their sum, which is softmax over the k chosen logits.

    Returns:
        weights_TK [T, K] fp32, largest first, ties to the lower expert id; expert_ids_TK [T, K]
        int32; probs_TE [T, E] fp32. Weights and probs are differentiable.

    Raises:
        ValueError: logits_TE is not a floating [T, E], or k is not in 1..E.
    """
    _check_choice("logits_TE", logits_TE, k)
    return torch.ops.mb.topk_softmax(logits_TE, k, renormalize)


def topk_ids(scores_TE: Tensor, k: int) -> Tensor:
    """The experts of the k largest scores per token.

    For routers whose choice is not that of a softmax: by scores plus a balancing bias, say
    (arXiv 2408.15664), or within groups of experts, the others at -inf.

    Args:
        scores_TE: [T, E], fp32, bf16 or fp16.
        k: experts per token, 1 to E.

    Returns:
        expert_ids_TK [T, K] int32, by descending score, ties to the lower expert id; NaN is above
        all numbers.

    Raises:
        ValueError: scores_TE is not a floating [T, E], or k is not in 1..E.
    """
    _check_choice("scores_TE", scores_TE, k)
    return torch.ops.mb.topk_ids(scores_TE.detach(), k)


def _check_choice(name: str, x_TE: Tensor, k: int) -> None:
    checks.require_dense(name, x_TE)
    if x_TE.ndim != 2 or not x_TE.is_floating_point():
        raise ValueError(
            f"{name}: expected a floating tensor [tokens, experts]; got {x_TE.dtype} "
            f"{tuple(x_TE.shape)}. Flatten leading dimensions with .flatten(0, -2)."
        )
    checks.require_floating(name, x_TE)
    checks.require_integer(k=k)
    if not 1 <= k <= x_TE.shape[1]:
        raise ValueError(
            f"k: expected 1 to {x_TE.shape[1]}, the number of experts; got {k}. "
            "Lower top_k or add experts."
        )


def bin_tokens(expert_ids_TK: Tensor, num_experts: int, *, capacity: int | None = None) -> Bins:
    """Sort slots by expert, stably in slot order.

    Args:
        expert_ids_TK: [T, K] integer. Ids 0 to num_experts - 1 route; -1 and num_experts mark a
            slot that no expert takes (padding, another rank's): dropped and not counted. Any other
            id is a mistake: dropped too, but an error if the environment has ``MB_DEBUG=1``. That
            check makes the host wait for the device, except in a graph capture, which skips it.
        num_experts: E.
        capacity: each expert keeps its first ``capacity`` slots in slot order and drops the rest;
            None keeps all.

    Returns:
        Bins of int32 tensors on the ids' device.

    Raises:
        ValueError: ids are not an integer [T, K], num_experts < 1, capacity < 0, a float for one of
            these; 2**30 slots on a GPU; or, with ``MB_DEBUG=1``, an id is outside -1..num_experts.
    """
    checks.require_dense("expert_ids_TK", expert_ids_TK)
    if expert_ids_TK.ndim != 2 or expert_ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert_ids_TK: expected int32 or int64 [tokens, top_k]; got {expert_ids_TK.dtype} "
            f"{tuple(expert_ids_TK.shape)}. Use the ids topk_softmax returns, or ids[:, None]."
        )
    checks.require_integer(num_experts=num_experts, capacity=capacity)
    if num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1; got {num_experts}.")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity: expected None or at least 0; got {capacity}. None drops none.")
    return Bins(*torch.ops.mb.bin_tokens(expert_ids_TK, num_experts, capacity))


def _topk_softmax_fake(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    accumulator = wide_dtype(logits)
    weights = logits.new_empty((logits.shape[0], k), dtype=accumulator)
    return (
        weights,
        torch.empty_like(weights, dtype=torch.int32),
        torch.empty_like(logits, dtype=accumulator, memory_format=torch.contiguous_format),
    )


def _topk_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, ctx.renormalize = inputs
    weights, ids, probs = output
    ctx.logits_dtype = logits.dtype
    ctx.save_for_backward(probs, weights, ids)
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)  # probs often have no gradient: no [T, E] of zeros


def _topk_softmax_backward(
    ctx: Any, d_weights: Tensor | None, d_ids: None, d_probs: Tensor | None
) -> tuple[Tensor | None, None, None]:
    if d_weights is None and d_probs is None:
        return None, None, None
    probs, weights, ids = ctx.saved_tensors
    if d_weights is None:
        d_weights = torch.zeros_like(weights)
    d_logits = torch.ops.mb.topk_softmax_backward(
        d_weights, d_probs, probs, weights, ids, ctx.renormalize
    )
    return d_logits.to(ctx.logits_dtype), None, None


def _bin_tokens_fake(
    ids: Tensor, num_experts: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = ids.new_empty(ids.numel(), dtype=torch.int32)
    counts = ids.new_empty(num_experts, dtype=torch.int32)
    offsets = ids.new_empty(num_experts + 1, dtype=torch.int32)
    return order, torch.empty_like(order), counts, offsets


registration.register(
    "topk_ids(Tensor scores, int k) -> Tensor",
    reference=reference.topk_ids,
    kernels="mb_kernels.routing.kernels",
    fake=lambda scores, k: scores.new_empty((scores.shape[0], k), dtype=torch.int32),
)
registration.register(
    "topk_softmax(Tensor logits, int k, bool renormalize) -> (Tensor, Tensor, Tensor)",
    reference=lambda logits, k, renormalize: reference.topk_softmax(
        logits, k, renormalize=renormalize
    ),
    kernels="mb_kernels.routing.kernels",
    fake=_topk_softmax_fake,
    setup_context=_topk_softmax_setup,
    backward=_topk_softmax_backward,
)
registration.register(
    "topk_softmax_backward(Tensor d_weights, Tensor? d_probs, Tensor probs, Tensor weights, "
    "Tensor ids, bool renormalize) -> Tensor",
    reference=reference.topk_softmax_backward,
    kernels="mb_kernels.routing.kernels",
    fake=lambda d_weights, d_probs, probs, *_: probs.new_empty(probs.shape),
)
registration.register(
    # SymInt: a capacity follows the number of tokens, and an int would be compiled for each anew.
    "bin_tokens(Tensor ids, int num_experts, SymInt? capacity) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=lambda ids, num_experts, capacity: tuple(
        reference.bin_tokens(ids, num_experts, capacity=capacity)
    ),
    kernels="mb_kernels.routing.kernels",
    fake=_bin_tokens_fake,
    debug_check=lambda ids, num_experts, capacity: checks.debug_expert_ids(ids, num_experts),
)
