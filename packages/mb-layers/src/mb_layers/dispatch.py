"""Dispatchers bring tokens to their experts: the one part in which `dMoE`, `MoE` and expert
parallelism differ.

`dispatch` turns routed tokens into what the experts of this rank compute on, and `combine` brings
the results back to the tokens. `LocalDispatcher` is for one process. It moves nothing and only
sorts the slots by expert, because `mb_kernels.expert_mlp` gathers and combines by itself. A
dispatcher over several ranks exchanges rows in both methods; the layer's code is the same.

Letters: T tokens, D hidden, E experts, K top-k, N = T K slots, R rows or tokens on this rank.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple, Protocol, TypeVar

import mb_kernels
import torch
from mb_kernels import Bins
from torch import Tensor

from mb_layers.config import DropPolicy

Values = TypeVar("Values", bound=NamedTuple)


class Dispatched(NamedTuple):
    """What the experts on this rank compute on, and what the layer reports.

    x_RD, weights_RK: tokens and their routing weights (fp32), for `expert_mlp` with `bins`.
    bins: slots sorted by the experts of this rank.
    tokens_per_expert_E: slots that this rank's tokens chose, for all E experts of the layer,
        before capacity drops any. A slot with expert id -1 (padding, say) is not counted.
    kept_slots: scalar, how many of those slots survive capacity.
    state: whatever `combine` needs.
    max_rows: an upper bound of the slots that the experts of this rank got, for `expert_mlp`; None:
        R K.
    x_stays: False if the memory of x_RD is overwritten before the backward pass, so that the
        experts have to keep a copy.
    home_P: addresses at which the experts store their result instead of returning it, see
        `mb_kernels.expert_mlp`. None for experts that cannot (`Experts.stores_home`).
    """

    x_RD: Tensor
    weights_RK: Tensor
    bins: Bins
    tokens_per_expert_E: Tensor
    kept_slots: Tensor
    state: Any = None
    max_rows: int | None = None
    x_stays: bool = True
    home_P: Tensor | None = None


class TokenDispatcher(Protocol):
    """Moves tokens to the experts and back. Both methods are differentiable.

    They are called with positional arguments, so an implementation may name them as it likes.
    """

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor, /) -> Dispatched:
        """Bring the tokens [T, D], routed by weights and ids [T, K], to their experts."""
        ...

    def combine(self, y_RD: Tensor, dispatched: Dispatched, /) -> Tensor:
        """Bring the experts' result home: y_TD, each token's weighted sum over its experts."""
        ...


class LocalDispatcher:
    """All experts in this process; no copy.

    Args:
        num_experts: E.
        capacity_factor: None drops nothing. Otherwise an expert keeps at most
            `capacity(T, K, E, capacity_factor)` slots; the others add nothing to the output.
        min_capacity: but at least this many slots.
        drop_policy: "position" keeps the first slots of an expert in token order, "probability"
            the ones with the largest weight, equal weights in token order.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float | None = None,
        *,
        min_capacity: int = 0,
        drop_policy: DropPolicy = "position",
    ) -> None:
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self._ratio = None if capacity_factor is None else as_ratio(capacity_factor)
        self.min_capacity = min_capacity
        self.drop_policy = drop_policy

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Sort the slots by expert; a slot of expert id -1 visits none."""
        if self._ratio is None:
            bins = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts)
        else:
            bins = bin_within_capacity(
                expert_ids_TK,
                self.num_experts,
                self._ratio,
                min_capacity=self.min_capacity,
                by_weight_TK=weights_TK if self.drop_policy == "probability" else None,
            )
        return Dispatched(
            x_TD, weights_TK, bins, bins.tokens_per_expert_E, kept_slots=bins.offsets_E1[-1]
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return y_RD as it is: `expert_mlp` has combined already."""
        return y_RD


def replaced(values: Values, **changes: Any) -> Values:
    """Return a NamedTuple with other values for some fields.

    `_replace` does the same, but the compiler of torch 2.11 loses its result at a graph break, such
    as an exchange between ranks.
    """
    return type(values)(**(values._asdict() | changes))


def capacity(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """Return C = ceil(factor K T / E), computed exactly: 1.1 means 11/10, not its binary neighbour.

    Args:
        num_tokens: T, the tokens of all ranks that share the experts, so that C does not depend on
            how they are spread.
        top_k: K, experts a token visits.
        num_experts: E.
        capacity_factor: 1 is room for perfectly even routing.
    """
    return _capacity(num_tokens * top_k, num_experts, as_ratio(capacity_factor))


def as_ratio(capacity_factor: float) -> tuple[int, int]:
    """Return the fraction that a capacity factor means, (numerator, denominator).

    Numerator and denominator are small enough that products with a number of slots fit int64. For
    that, factors above 2**31 (an expert then takes any number of slots) count as 2**31, and those
    below a millionth as a millionth.
    """
    bounded = min(max(float(capacity_factor), 1e-6), 2.0**31)
    factor = Fraction(repr(bounded)).limit_denominator(1_000_000)
    return factor.numerator, factor.denominator


def bin_within_capacity(
    expert_ids_TK: Tensor,
    num_experts: int,
    factor: tuple[int, int],
    *,
    min_capacity: int = 0,
    by_weight_TK: Tensor | None = None,
) -> Bins:
    """Bin slots as `mb_kernels.bin_tokens`, keeping at most ceil(factor n / E) for each expert.

    n are the slots of all experts: K T, less those of id -1, so that padding changes neither what
    is kept nor how much. It is counted on the device: no host sync, and nothing that depends on
    the number of tokens is compiled into a graph.

    Args:
        factor: the capacity factor, from `as_ratio`.
        min_capacity: keep at least so many slots.
        by_weight_TK: keep each expert's largest weights, equal ones in slot order; None: its first
            slots. The kept slots of an expert stay in slot order.
    """
    ids_N = expert_ids_TK.reshape(-1)
    order_N = None
    if by_weight_TK is not None:  # slots by weight, equal weights in slot order
        weights_N = by_weight_TK.detach().reshape(-1)
        order_N = torch.sort(weights_N, descending=True, stable=True).indices
    all_bins = mb_kernels.bin_tokens(
        (ids_N if order_N is None else ids_N[order_N])[:, None], num_experts
    )
    rows_N = all_bins.inverse_N  # a slot's place among all, or -1
    if order_N is not None:
        rows_N = torch.empty_like(rows_N).scatter(0, order_N, rows_N)
    limit = capacity_of(all_bins.offsets_E1[-1], num_experts, factor, min_capacity)
    first_row_N = all_bins.offsets_E1[ids_N.clamp(0, num_experts - 1).long()]
    ids_N = torch.where(rows_N - first_row_N < limit, ids_N, -1)
    bins = mb_kernels.bin_tokens(ids_N.view_as(expert_ids_TK), num_experts)
    return replaced(bins, tokens_per_expert_E=all_bins.tokens_per_expert_E)


def capacity_of(
    slots: Tensor, num_experts: int, factor: tuple[int, int], min_capacity: int
) -> Tensor:
    """ceil(factor slots / E), at least `min_capacity`, of a number of slots on the device.

    Args:
        slots: integer scalar.
        factor: from `as_ratio`.

    Returns:
        int64 scalar that fits int32: compared with int32, it would be cut to its low 32 bits.
    """
    limit = _capacity(slots.long(), num_experts, factor)
    return limit.clamp(min=min_capacity, max=torch.iinfo(torch.int32).max)


def _capacity(slots: Any, num_experts: int, factor: tuple[int, int]) -> Any:
    """ceil(factor slots / E) of an int or an integer tensor."""
    numerator, denominator = factor
    return -(-numerator * slots // (denominator * num_experts))
