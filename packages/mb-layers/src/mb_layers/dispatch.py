"""Where a token meets its experts: the one difference between `dMoE`, `MoE` and expert parallelism.

A dispatcher turns routed tokens into what the experts of this rank compute on, and its `combine`
brings the result home. `LocalDispatcher` serves one process: it moves nothing, it only sorts the
slots by expert, because `mb_kernels.expert_mlp` gathers and combines by itself. A dispatcher over
several ranks exchanges rows in `dispatch` and `combine`, and the layer stays the same text.

Letters: T tokens, D hidden, E experts, K top-k, N = T K slots, R rows or tokens on this rank.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import mb_kernels
import torch
from mb_kernels import Bins
from torch import Tensor

from mb_layers.config import DropPolicy


class Dispatched(NamedTuple):
    """What the experts on this rank compute on, and what the layer reports.

    x_RD, weights_RK: tokens and their routing weights (fp32), for `expert_mlp` with `bins`.
    bins: slots sorted by the experts of this rank.
    tokens_per_expert_E: slots that this rank's tokens chose, for all E experts of the layer,
        before capacity drops any.
    kept_slots: scalar, how many of those slots survive capacity.
    state: whatever `combine` needs.
    """

    x_RD: Tensor
    weights_RK: Tensor
    bins: Bins
    tokens_per_expert_E: Tensor
    kept_slots: Tensor
    state: Any = None


class TokenDispatcher(Protocol):
    """Moves tokens to the experts and back. Both methods are differentiable."""

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Bring the tokens [T, D], routed by weights and ids [T, K], to their experts."""
        ...

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the experts' result home: y_TD, each token's weighted sum over its experts."""
        ...


class LocalDispatcher:
    """All experts in this process; no copy.

    Args:
        num_experts: E.
        capacity_factor: None drops nothing. Otherwise an expert keeps at most
            `capacity(T, K, E, capacity_factor)` slots; the others add nothing to the output.
        drop_policy: "position" keeps the first slots of an expert in token order, "probability"
            the ones with the largest weight, equal weights in token order.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float | None = None,
        *,
        drop_policy: DropPolicy = "position",
    ) -> None:
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.drop_policy = drop_policy

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Sort the slots by expert."""
        num_tokens, top_k = expert_ids_TK.shape
        if self.capacity_factor is None:
            bins = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts)
        else:
            limit = capacity(num_tokens, top_k, self.num_experts, self.capacity_factor)
            if self.drop_policy == "position":
                bins = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts, capacity=limit)
            else:
                bins = bin_by_probability(expert_ids_TK, weights_TK, self.num_experts, limit)
        return Dispatched(
            x_TD, weights_TK, bins, bins.tokens_per_expert_E, kept_slots=bins.offsets_E1[-1]
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return y_RD as it is: `expert_mlp` has combined already."""
        return y_RD


def capacity(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Return C = ceil(factor K T / E), computed exactly: 1.1 means 11/10, not its binary neighbour.

    `num_tokens` are the tokens of all ranks that share the experts, so that C does not depend on
    how they are spread.
    """
    factor = Fraction(repr(float(capacity_factor)))
    return -(-factor.numerator * top_k * num_tokens // (factor.denominator * num_experts))


def bin_by_probability(
    expert_ids_TK: Tensor, weights_TK: Tensor, num_experts: int, limit: int
) -> Bins:
    """Bin slots as `mb_kernels.bin_tokens`, keeping each expert's `limit` largest weights.

    The kept slots of an expert stay in slot order. No host sync.
    """
    ids_N = expert_ids_TK.reshape(-1)
    order_N = torch.sort(
        weights_TK.detach().reshape(-1), descending=True, stable=True
    ).indices  # slots by weight, equal weights in slot order
    by_weight = mb_kernels.bin_tokens(ids_N[order_N, None], num_experts)
    first_row_N = by_weight.offsets_E1[ids_N[order_N].long()]
    kept_N = torch.empty_like(ids_N, dtype=torch.bool)
    kept_N[order_N] = by_weight.inverse_N - first_row_N < limit
    ids_TK = torch.where(kept_N, ids_N, -1).view_as(expert_ids_TK)  # -1: a slot of no expert
    bins = mb_kernels.bin_tokens(ids_TK, num_experts)
    return bins._replace(tokens_per_expert_E=by_weight.tokens_per_expert_E)
