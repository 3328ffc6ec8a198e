"""An expert's capacity over the tokens of all ranks: the same slots are dropped on one and on many.

Slots are dropped before they travel, whichever dispatcher moves the others.

Letters: T tokens, D hidden, E experts, K top-k, P ranks, G tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels import Bins
from mb_layers.config import DropPolicy
from mb_layers.dispatch import Capacity, Dispatched, TokenDispatcher, bin_within, replaced
from mb_layers.tensors import at_least_fp32
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, counts_of_ranks, gathered
from mb_parallel.expert_parallel.peer import PeerDispatcher


class GlobalCapacity:
    """Keeps at most C = ceil(factor K G / E) slots per expert, G being the tokens of all ranks.

    Slots are counted in the order of the batch: rank by rank or, if neighbouring ranks hold parts
    of the same sequences, sequence by sequence. Rank by rank this takes one exchange of E counts.
    Sequence by sequence, or to drop by weight, it takes one of ids (and weights), 4 to 8 bytes a
    slot. Without `equal_tokens` the ranks first exchange their numbers of tokens. Where the rows
    travel through peer memory among the same ranks, counts do so too.

    Args:
        inner: moves the slots that are left.
        num_experts, capacity_factor, min_capacity, drop_policy: as for `LocalDispatcher`.
        place: the ranks that share the capacity.
        equal_tokens: all ranks always bring the same number of tokens and of sequences.
        split_over: number of neighbouring ranks that hold successive parts of the same sequences
            (context and sequence parallelism); 1: a rank has whole sequences.

    `sequences`, used with `split_over`, is the number of sequences in the next call of `dispatch`.
    """

    def __init__(
        self,
        inner: TokenDispatcher,
        num_experts: int,
        capacity_factor: float,
        place: Place,
        *,
        min_capacity: int = 0,
        drop_policy: DropPolicy = "position",
        equal_tokens: bool = False,
        split_over: int = 1,
    ) -> None:
        self.inner = inner
        self.num_experts = num_experts
        self.capacity = Capacity(num_experts, capacity_factor, min_capacity)
        self.drop_policy = drop_policy
        self.place = place
        self.equal_tokens = equal_tokens
        self.split_over = split_over
        self.sequences = 1
        peers = isinstance(inner, PeerDispatcher) and inner.place.group == place.group
        self._peers: PeerDispatcher | None = inner if peers else None
        self._by_counts = drop_policy == "position" and split_over == 1

    @property
    def has_collectives(self) -> bool:
        """Whether what the ranks tell each other takes collectives, beside those of `inner`."""
        return self._peers is None or not (self._by_counts and self.equal_tokens)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Dispatch the slots that are kept; the others get expert id -1."""
        bins = mb_kernels.bin_tokens(expert_ids_TK, self.num_experts)
        counts_E = bins.tokens_per_expert_E
        per_rank = self._per_rank(expert_ids_TK)
        if self._by_counts:
            kept_TK = self._first_kept(expert_ids_TK, bins)
        else:
            kept_TK = self._kept(weights_TK.detach(), expert_ids_TK, per_rank)
        # With padding the limit on the device is lower: slots of no expert do not count there.
        slots, top_k = sum(theirs for theirs, _ in per_rank), expert_ids_TK.shape[1]
        limit = self.capacity.of(slots * top_k)
        ids_TK = torch.where(kept_TK, expert_ids_TK, -1)
        dispatched = self.inner.dispatch(x_TD, weights_TK, ids_TK)
        kept = kept_TK.sum(dtype=torch.int32)
        max_rows = max(limit * (dispatched.bins.offsets_E1.shape[0] - 1), 1)
        if dispatched.max_rows is not None:
            max_rows = min(max_rows, dispatched.max_rows)
        counts = {"tokens_per_expert_E": counts_E, "kept_slots": kept}
        return replaced(dispatched, **counts, max_rows=max_rows)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """As the inner dispatcher; dropped slots add nothing."""
        return self.inner.combine(y_RD, dispatched)

    def _per_rank(self, expert_ids_TK: Tensor) -> list[list[int]]:
        """Tokens and sequences of each rank."""
        mine = [expert_ids_TK.shape[0], self.sequences]
        if self.equal_tokens:
            return [mine] * self.place.size
        counts = torch.tensor(mine, dtype=torch.int32, device=expert_ids_TK.device)
        return counts_of_ranks(counts, self.place)

    def _first_kept(self, expert_ids_TK: Tensor, bins: Bins) -> Tensor:
        """Which slots are kept where ranks come one after the other, by their places in `bins`."""
        counts_E, peers = bins.tokens_per_expert_E, self._peers
        if peers is None:
            counts_PE = gathered(counts_E[None], self.place)
        else:
            counts_PE = peers.buffers.gathered(counts_E, peers.layer)
        limit = self.capacity.on_device(counts_PE.sum())
        left_E = limit - counts_PE[: self.place.rank].sum(dim=0)
        ids_N = expert_ids_TK.reshape(-1).clamp(0, self.num_experts - 1).long()
        place_N = bins.inverse_N - bins.offsets_E1[ids_N]
        return ((bins.inverse_N >= 0) & (place_N < left_E[ids_N])).view_as(expert_ids_TK)

    def _kept(
        self, weights_TK: Tensor, expert_ids_TK: Tensor, per_rank: Sequence[Sequence[int]]
    ) -> Tensor:
        """Which slots are kept, by the ids of all ranks."""
        tokens = expert_ids_TK.shape[0]
        longest = max(theirs for theirs, _ in per_rank)
        padding = (0, 0, 0, longest - tokens)
        order_G = None
        if self.split_over > 1:
            order_G = batch_order(per_rank, longest, self.split_over, expert_ids_TK.device)

        def of_batch(values_TK: Tensor, pad: float) -> Tensor:
            values_GK = gathered(F.pad(values_TK, padding, value=pad), self.place)
            return values_GK if order_G is None else values_GK[order_G]

        ids_GK = of_batch(expert_ids_TK, -1)
        weights_GK = None
        if self.drop_policy != "position":
            weights_GK = of_batch(at_least_fp32(weights_TK), 0)
        bins = bin_within(self.capacity, ids_GK, by_weight_TK=weights_GK)
        kept_GK = (bins.inverse_N >= 0).view_as(ids_GK)
        if order_G is not None:
            kept_GK = torch.empty_like(kept_GK).index_copy_(0, order_G, kept_GK)
        return kept_GK.chunk(self.place.size)[self.place.rank][:tokens]


def batch_order(
    per_rank: Sequence[Sequence[int]], longest: int, split_over: int, device: torch.device
) -> Tensor:
    """All ranks' rows, padded to the longest, in the batch's order; padding is anywhere.

    Args:
        per_rank: tokens and sequences of each rank.
        split_over: as for `GlobalCapacity`.
    """
    row_PT = torch.arange(len(per_rank) * longest, device=device).view(len(per_rank), longest)
    order = []
    for first in range(0, len(per_rank), split_over):
        tokens, sequences = per_rank[first]
        row_pT = row_PT[first : first + split_over]
        runs_pBS = row_pT[:, :tokens].unflatten(1, (max(sequences, 1), -1))
        order += [runs_pBS.transpose(0, 1).flatten(), row_pT[:, tokens:].flatten()]
    return torch.cat(order)
