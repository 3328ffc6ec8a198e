"""The routing that travels with each token to the ranks of its experts.

``pack_routing`` runs on the rank a token belongs to, ``unpack_routing`` on the rank it was sent to.
Each is one launch, where the references take a dozen: the exchange has to wait for them.

Of E experts on P ranks, rank r holds the E / P from r E / P on. If there are more ranks than
experts, P / E neighbouring ranks hold a part of one expert's width each, and its tokens go to all
of them.

Letters: T tokens, K top-k, E experts, P ranks, C destinations of a token at most, R received rows,
J = min(K, experts on a rank) choices of a token there at most.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mb_kernels.exchange import routing_reference as reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide


class PackedRouting(NamedTuple):
    """What ``pack_routing`` returns.

    words_TW: [T, 2K], weights beside ids, -1 for none, in the dtype of the weights, at least fp32;
        the gradient is the weights'.
    peers_TC: int32 [T, C], the ranks each token has to reach, every rank once, -1 where fewer.
    tokens_per_expert_E: int32 [E].
    slots: int32 scalar, their sum.
    """

    words_TW: Tensor
    peers_TC: Tensor
    tokens_per_expert_E: Tensor
    slots: Tensor


def pack_routing(
    weights_TK: Tensor, expert_ids_TK: Tensor, *, num_experts: int, ranks: int
) -> PackedRouting:
    """Destinations, load and a message for each token.

    Args:
        weights_TK: [T, K] floating.
        expert_ids_TK: [T, K] int32 or int64; ids outside 0..E-1 are of no expert.
        num_experts, ranks: E below 2^24 and P, one of which divides the other.

    Raises:
        ValueError: a shape, dtype or device that does not fit, sizes that do not divide.
    """
    checks.require_floating("weights_TK", weights_TK)
    checks.require_indices("weights_TK", weights_TK, expert_ids_TK=expert_ids_TK)
    shape = weights_TK.shape
    if len(shape) != 2 or shape[1] < 1 or expert_ids_TK.shape != shape:
        raise ValueError(
            "expert_ids_TK: expected [T, K], as weights_TK, with K of at least 1; got "
            f"{tuple(expert_ids_TK.shape)} and {tuple(shape)}."
        )
    _require_sizes(num_experts, ranks)
    words, peers, counts = torch.ops.mb.pack_routing(
        wide(weights_TK), expert_ids_TK, num_experts, ranks
    )
    return PackedRouting(words, peers, counts[:-1], counts[-1])


def unpack_routing(
    words_RW: Tensor,
    *,
    num_experts: int,
    ranks: int,
    rank: int,
    counts_P: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's choices among those that came with each row.

    Args:
        words_RW: [R, 2K] from ``pack_routing``.
        num_experts, ranks, rank: E, P and which of them this is.
        counts_P: int32 [P]: R is P equal parts, and of part p so many rows came from rank p, the
            others hold anything. None: all rows came.

    Returns:
        weights [R, J] and local ids [R, J] int32, 0 and -1 for none; and the column of each choice,
        [R, K] int32, -1 for those of other ranks. Columns are choices; where the rank has fewer
        experts than K they are its experts, and an expert that was chosen twice has the sum of the
        weights. The weights are differentiable.

    Raises:
        ValueError: a shape, dtype or device that does not fit, sizes that do not divide.
    """
    _require_sizes(num_experts, ranks)
    checks.require_dense("words_RW", words_RW)
    if words_RW.ndim != 2 or words_RW.shape[1] % 2 or words_RW.shape[1] == 0:
        raise ValueError(f"words_RW: expected [R, 2K]; got {tuple(words_RW.shape)}.")
    if words_RW.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"words_RW: expected float32 or float64, as packed; got {words_RW.dtype}.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}; got {rank}.")
    if counts_P is not None:
        checks.require_indices("words_RW", words_RW, counts_P=counts_P)
        if counts_P.shape != (ranks,) or words_RW.shape[0] % ranks:
            raise ValueError(
                f"counts_P: expected [{ranks}], a count for each {ranks}-th of the rows; got "
                f"{tuple(counts_P.shape)} for {words_RW.shape[0]} rows."
            )
    per_rank, sharing = reference.spread(num_experts, ranks)
    return torch.ops.mb.unpack_routing(words_RW, counts_P, rank // sharing * per_rank, per_rank)


def unpack_routing_backward(d_weights_RJ: Tensor, columns_RK: Tensor) -> Tensor:
    """The gradient [R, K] of the weights that ``unpack_routing`` was given."""
    return torch.ops.mb.unpack_routing_backward(d_weights_RJ, columns_RK)


def _require_sizes(num_experts: int, ranks: int) -> None:
    if min(num_experts, ranks) < 1 or (num_experts % ranks and ranks % num_experts):
        raise ValueError(
            f"ranks: expected to divide num_experts or to be a multiple of it; got {ranks} for "
            f"{num_experts}."
        )
    if num_experts >= 2**24:
        raise ValueError(f"num_experts: expected ids that fp32 holds; got {num_experts}.")


def _pack_fake(weights: Tensor, ids: Tensor, experts: int, ranks: int) -> tuple[Tensor, ...]:
    tokens, top_k = weights.shape
    columns = reference.most_destinations(top_k, experts, ranks)
    return (
        weights.new_empty((tokens, 2 * top_k)),
        weights.new_empty((tokens, columns), dtype=torch.int32),
        weights.new_empty(experts + 1, dtype=torch.int32),
    )


def _pack_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _pack_backward(ctx: Any, d_words: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    d_weights = None if d_words is None else d_words[:, : d_words.shape[1] // 2]
    return d_weights, None, None, None


def _unpack_fake(
    words: Tensor, counts: Tensor | None, first: int, per_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    weights = words.new_empty((words.shape[0], min(words.shape[1] // 2, per_rank)))
    columns = words.new_empty((words.shape[0], words.shape[1] // 2), dtype=torch.int32)
    return weights, torch.empty_like(weights, dtype=torch.int32), columns


def _unpack_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, ids, columns = output
    ctx.save_for_backward(columns)
    ctx.mark_non_differentiable(ids, columns)
    ctx.set_materialize_grads(False)


def _unpack_backward(ctx: Any, d_weights: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if d_weights is None:
        return (None,) * 4
    d_words = torch.ops.mb.unpack_routing_backward(d_weights, *ctx.saved_tensors)
    return torch.nn.functional.pad(d_words, (0, d_words.shape[1])), None, None, None


_KERNELS = "mb_kernels.exchange.routing_kernels"
registration.register(
    "pack_routing(Tensor weights, Tensor ids, int experts, int ranks) -> (Tensor, Tensor, Tensor)",
    reference=reference.pack_routing,
    kernels=_KERNELS,
    fake=_pack_fake,
    setup_context=_pack_setup,
    backward=_pack_backward,
    debug_check=lambda weights, ids, experts, ranks: checks.debug_expert_ids(ids, experts),
)
registration.register(
    "unpack_routing(Tensor words, Tensor? counts, int first, int per_rank) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.unpack_routing,
    kernels=_KERNELS,
    fake=_unpack_fake,
    setup_context=_unpack_setup,
    backward=_unpack_backward,
)
registration.register(
    "unpack_routing_backward(Tensor d_weights, Tensor columns) -> Tensor",
    reference=reference.unpack_routing_backward,
    kernels=_KERNELS,
    fake=lambda d_weights, columns: d_weights.new_empty(columns.shape),
)
