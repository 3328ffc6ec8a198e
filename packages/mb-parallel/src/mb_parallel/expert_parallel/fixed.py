"""Expert parallelism in fixed shapes, for layers with a capacity: C rows a rank and expert.

A rank counts the capacity of an expert over its own tokens, as GShard and Megatron Core do, so that
it knows by itself what it sends and what it gets: C rows a pair, empty ones included. One exchange
brings them to the experts and one brings the results home; no count is exchanged, nothing is read
back to the host, and a CUDA graph can hold the layer on any backend.

    E = 4 experts on P = 2 ranks, C = 3       to rank 0       |  to rank 1
    rows that a rank sends, - for empty:      a c -   b d e   |  - - -   a f -

Which tokens are dropped depends on how they are spread over ranks. `around.GlobalCapacity` counts
the tokens of all ranks instead: there an expert may get all of its rows from one rank, so that
fixed shapes would have to hold every token for every rank, as `AllGatherDispatcher` does.

Letters: T tokens, D hidden, E experts, K top-k, N = T K slots, P ranks, s ranks per expert,
C capacity, S = E s C rows to send, R = S received rows, M = N s slots to send.
"""

from __future__ import annotations

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels import Bins
from mb_layers.config import DropPolicy
from mb_layers.dispatch import Dispatched, as_ratio, bin_within_capacity, capacity
from mb_layers.experts import cast_alike
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, exchange_rows, longest_of_ranks
from mb_parallel.expert_parallel.placement import Placement


class FixedDispatcher:
    """Sends as many rows to every expert, whatever the routing: those that fit its capacity.

    A token goes once to each of its experts, and its results are weighted at home, so that no
    routing travels. The experts compute empty rows too.

    Args:
        num_experts, capacity_factor, min_capacity, drop_policy: as for `LocalDispatcher`, of the
            tokens of one rank.
        place: the expert-parallel group.
        equal_tokens: every rank always brings as many tokens. False: ranks tell each other how
            many, which makes the host wait for the device, and pad to the longest.
    """

    def __init__(
        self,
        num_experts: int,
        capacity_factor: float,
        place: Place,
        *,
        min_capacity: int = 0,
        drop_policy: DropPolicy = "position",
        equal_tokens: bool = False,
    ) -> None:
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self._ratio = as_ratio(capacity_factor)
        self.place = place
        self.min_capacity = min_capacity
        self.drop_policy = drop_policy
        self.equal_tokens = equal_tokens
        self.placement = Placement(num_experts, place.size, place.rank)

    def with_factor(self, capacity_factor: float) -> FixedDispatcher:
        """The same with another capacity, as for evaluation."""
        return FixedDispatcher(
            self.num_experts,
            capacity_factor,
            self.place,
            min_capacity=self.min_capacity,
            drop_policy=self.drop_policy,
            equal_tokens=self.equal_tokens,
        )

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Send C rows to each expert; bins hold all rows that came, one slot each."""
        (x_TD,) = cast_alike(x_TD)  # autocast's dtype travels, not fp32
        tokens, top_k = expert_ids_TK.shape
        longest = tokens if self.equal_tokens else longest_of_ranks(tokens, self.place, x_TD.device)
        if longest > tokens:
            padding = (0, 0, 0, longest - tokens)
            x_TD, weights_TK = F.pad(x_TD, padding), F.pad(weights_TK, padding)
            expert_ids_TK = F.pad(expert_ids_TK, padding, value=-1)
        kept = bin_within_capacity(
            expert_ids_TK,
            self.num_experts,
            self._ratio,
            min_capacity=self.min_capacity,
            by_weight_TK=weights_TK if self.drop_policy == "probability" else None,
        )
        limit = capacity(longest, top_k, self.num_experts, self.capacity_factor)
        limit = min(max(limit, self.min_capacity), longest * top_k)
        shards = self.placement.width_shards
        sent = _in_fixed_places(kept, expert_ids_TK, limit, shards)
        # The gradient of a dropped slot's weight is not written.
        weights_TK = torch.where(kept.inverse_N.view_as(expert_ids_TK) >= 0, weights_TK, 0)
        weights_TC = weights_TK.repeat_interleave(shards, dim=1)
        rows_SD = mb_kernels.gather(x_TD, sent, weights_TC.shape[1])
        rows_RD = self._exchange(rows_SD)
        experts = self.placement.experts_per_rank
        ids_R = torch.arange(experts, dtype=torch.int32, device=x_TD.device)
        ids_R = ids_R.repeat_interleave(limit).repeat(self.place.size)
        bins = mb_kernels.bin_tokens(ids_R[:, None], experts)
        ones_R1 = torch.ones_like(ids_R, dtype=weights_TK.dtype)[:, None]
        state = (sent, weights_TC, tokens)
        return Dispatched(
            rows_RD, ones_R1, bins, kept.tokens_per_expert_E, kept.offsets_E1[-1], state
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the rows back, and sum each token's, weighted."""
        sent, weights_TC, tokens = dispatched.state
        return mb_kernels.combine(self._exchange(y_RD), sent, weights_TC)[:tokens]

    def _exchange(self, rows_SD: Tensor) -> Tensor:
        """As many rows to each rank as from it: the way back is the way there."""
        split = [rows_SD.shape[0] // self.place.size] * self.place.size
        return exchange_rows(rows_SD, split, split, self.place)


def _in_fixed_places(kept: Bins, expert_ids_TK: Tensor, limit: int, shards: int) -> Bins:
    """Bins of T K s slots with `limit` rows for each expert on each of its s ranks.

    Empty rows have order -1, dropped slots no row.
    """
    experts, device = kept.tokens_per_expert_E.shape[0], expert_ids_TK.device
    rows = experts * shards * limit
    id_N1 = expert_ids_TK.reshape(-1, 1).clamp(0, experts - 1).long()
    place_N1 = kept.inverse_N[:, None] - kept.offsets_E1[id_N1]
    row_Ns = (id_N1 * shards + torch.arange(shards, device=device)) * limit + place_N1
    row_M = torch.where(kept.inverse_N[:, None] >= 0, row_Ns, rows).flatten()
    slot_M = torch.arange(row_M.shape[0], dtype=torch.int32, device=device)
    order = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
    order = order.scatter(0, row_M, slot_M)[:rows]  # the last takes the dropped slots
    offsets = torch.arange(experts * shards + 1, dtype=torch.int32, device=device) * limit
    inverse_M = torch.where(row_M < rows, row_M, -1).int()
    return Bins(order, inverse_M, offsets.diff(), offsets)
