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
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeVar, get_args

import mb_kernels
import torch
from mb_kernels import Bins
from torch import Tensor

from mb_layers import arguments
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

    They are called with positional arguments, so an implementation may name them as it likes. One
    that is around another has that as `inner`.
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
        capacity_factor: None drops nothing, and the arguments below are refused. Otherwise an
            expert keeps at most `capacity(T, K, E, capacity_factor)` slots; the others add nothing
            to the output.
        min_capacity: but at least this many slots.
        drop_policy: "position" keeps the first slots of an expert in token order, "probability"
            the ones with the largest weight, equal weights in token order.

    Raises:
        ValueError: an argument of another kind or beyond its bounds.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float | None = None,
        *,
        min_capacity: int = 0,
        drop_policy: DropPolicy = "position",
    ) -> None:
        arguments.at_least_1(num_experts=num_experts)
        arguments.one_of(get_args(DropPolicy), drop_policy=drop_policy)
        self.num_experts = num_experts
        self.capacity = None
        if capacity_factor is not None:
            self.capacity = Capacity(num_experts, capacity_factor, min_capacity)
        else:
            arguments.none_without_capacity(
                min_capacity=(min_capacity, 0), drop_policy=(drop_policy, "position")
            )
        self.drop_policy = drop_policy

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Sort the slots by expert; a slot of expert id -1 visits none."""
        if self.capacity is None:
            bins = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts)
        else:
            by_weight_TK = weights_TK if self.drop_policy == "probability" else None
            bins = bin_within(self.capacity, expert_ids_TK, by_weight_TK=by_weight_TK)
        return Dispatched(
            x_TD, weights_TK, bins, bins.tokens_per_expert_E, kept_slots=bins.offsets_E1[-1]
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Return y_RD as it is: `expert_mlp` has combined already."""
        return y_RD


def innermost(dispatcher: Any) -> Any:
    """What moves the rows inside of whatever is around it; likewise of a `state`."""
    while hasattr(dispatcher, "inner"):
        dispatcher = dispatcher.inner
    return dispatcher


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

    Raises:
        ValueError: no expert, another number that is no integer, or a factor that is no number
            above 0.
    """
    arguments.integers(0, num_tokens=num_tokens, top_k=top_k)
    return Capacity(num_experts, capacity_factor).of(int(num_tokens) * int(top_k))


class Capacity:
    """The most slots of n that one of E experts takes: ceil(factor n / E), or `least` if more."""

    def __init__(self, num_experts: int, factor: float, least: int = 0) -> None:
        arguments.at_least_1(num_experts=num_experts)
        arguments.integers(0, min_capacity=least)
        if isinstance(factor, bool) or not isinstance(factor, Real) or not factor > 0:
            raise ValueError(f"expected capacity_factor to be a number > 0, got {factor!r}")
        # Products of these numbers with 2**30 slots fit int64. With a factor above 2**31 an expert
        # takes any number of slots; one below a millionth counts as a millionth, and one from 4096
        # on as the nearest whole number.
        bounded = min(max(float(factor), 1e-6), 2.0**31)
        ratio = Fraction(repr(bounded)).limit_denominator(1_000_000 if bounded < 4096 else 1)
        self.num_experts, self._least = num_experts, least
        self._numerator, self._denominator = ratio.numerator, ratio.denominator * num_experts

    def of(self, slots: int) -> int:
        """C of a number of slots on the host."""
        return max(self._share(slots), self._least)

    def on_device(self, slots: Tensor) -> Tensor:
        """C of an integer scalar.

        int64 that fits int32: compared with int32, it would be cut to its low 32 bits.
        """
        largest = torch.iinfo(torch.int32).max
        return self._share(slots.long()).clamp(min=self._least, max=largest)

    def _share(self, slots: Any) -> Any:
        return -(-self._numerator * slots // self._denominator)


def bin_within(
    capacity: Capacity, expert_ids_TK: Tensor, *, by_weight_TK: Tensor | None = None
) -> Bins:
    """Bin slots as `mb_kernels.bin_tokens`, keeping as many for each expert as its capacity.

    The slots of all experts are K T, less those of id -1, so that padding changes neither what is
    kept nor how much. They are counted on the device: no host sync, and nothing that depends on the
    number of tokens is compiled into a graph.

    Args:
        by_weight_TK: keep each expert's largest weights, equal ones in slot order; None: its first
            slots. The kept slots of an expert stay in slot order.
    """
    ids_N, num_experts = expert_ids_TK.reshape(-1), capacity.num_experts
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
    limit = capacity.on_device(all_bins.offsets_E1[-1])
    first_row_N = all_bins.offsets_E1[ids_N.clamp(0, num_experts - 1).long()]
    ids_N = torch.where(rows_N - first_row_N < limit, ids_N, -1)
    bins = mb_kernels.bin_tokens(ids_N.view_as(expert_ids_TK), num_experts)
    return replaced(bins, tokens_per_expert_E=all_bins.tokens_per_expert_E)
