"""Which rank holds which experts, and which ranks a token has to reach.

With E experts on P ranks, rank r holds the E / P experts from r E / P on. More ranks than experts
share the width: an expert's F is cut into P / E parts, held by neighbouring ranks, and a token that
visits the expert visits all of them; their partial outputs add up.

    E = 4, P = 2:  rank 0: experts 0, 1      E = 2, P = 4:  rank 0: expert 0, F first half
                   rank 1: experts 2, 3                     rank 1: expert 0, F second half
                                                            rank 2: expert 1, F first half  ...

Letters: T tokens, K top-k, E experts, P ranks, C destinations of a token at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mb_layers.losses import at_least_fp32
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """E experts on P ranks, seen from one of them.

    Raises:
        ValueError: neither of E and P divides the other.
    """

    num_experts: int
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        if self.num_experts % self.ranks and self.ranks % self.num_experts:
            raise ValueError(
                "Expected ep to divide the number of experts, or to be a multiple of it, got "
                f"ep = {self.ranks} for {self.num_experts} experts. Change ep or num_experts."
            )

    @property
    def experts_per_rank(self) -> int:
        return max(self.num_experts // self.ranks, 1)

    @property
    def width_shards(self) -> int:
        """Ranks that share the width of one expert; 1 unless there are more ranks than experts."""
        return max(self.ranks // self.num_experts, 1)

    @property
    def first_expert(self) -> int:
        return self.rank // self.width_shards * self.experts_per_rank

    def balanced_slots(self, tokens: int, top_k: int) -> float:
        """This rank's slots when `tokens` of all ranks load the experts evenly."""
        return tokens * top_k * self.experts_per_rank / self.num_experts

    def local_ids(self, expert_ids: Tensor) -> Tensor:
        """Ids among this rank's experts, int32 of the same shape; -1 for any other's and for none.

        An id of -1 or E is of no expert, as for `mb_kernels.bin_tokens`.
        """
        group = self.rank // self.width_shards
        mine = expert_ids // self.experts_per_rank == group
        return torch.where(mine, expert_ids.int() - self.first_expert, -1)

    def most_destinations(self, top_k: int) -> int:
        """C: the most ranks that one token can have to reach."""
        return min(top_k, self.ranks // self.width_shards) * self.width_shards

    def destinations(self, expert_ids_TK: Tensor) -> Tensor:
        """The ranks each token has to reach, every rank once: int32 [T, C], -1 where fewer."""
        groups, top_k = self.ranks // self.width_shards, expert_ids_TK.shape[1]
        # Ranks that share an expert make a group; ids of no expert fall outside of all groups.
        group_TK = expert_ids_TK.int() // self.experts_per_rank
        if groups <= top_k:
            every_G = torch.arange(groups, dtype=torch.int32, device=group_TK.device)
            needed_TG = (group_TK[:, None] == every_G[:, None]).any(dim=2)
            group_TC = torch.where(needed_TG, every_G, -1)
        else:
            group_TC = torch.where(group_TK < groups, group_TK, -1)
            if top_k > 1:
                same_TKK = group_TK[:, :, None] == group_TK[:, None, :]
                # An earlier choice goes there already.
                group_TC = group_TC.masked_fill(same_TKK.tril(-1).any(dim=2), -1)
        if self.width_shards == 1:
            return group_TC
        shards = torch.arange(self.width_shards, dtype=torch.int32, device=group_TK.device)
        rank_TCs = group_TC[:, :, None] * self.width_shards + shards
        return torch.where(group_TC[:, :, None] >= 0, rank_TCs, -1).flatten(1)


def pack_routing(weights_TK: Tensor, expert_ids_TK: Tensor) -> Tensor:
    """Weights and ids side by side, [T, 2K], to travel as one; the gradient is the weights'."""
    weights_TK = at_least_fp32(weights_TK)  # which holds any id below 2^24
    return torch.cat((weights_TK, expert_ids_TK.to(weights_TK.dtype)), dim=1)


def unpack_routing(packed_RK: Tensor, placement: Placement, top_k: int) -> tuple[Tensor, Tensor]:
    """The weights and ids of this rank's experts from what `pack_routing` made.

    Returns:
        weights [R, J] and local ids [R, J] int32, J = min(K, experts on this rank): a token's
        choices on this rank come first, in their order; the rest are -1.
    """
    weights_RK, ids_RK = packed_RK.split(top_k, dim=1)
    ids_RK = placement.local_ids(ids_RK.detach().int())
    columns = min(top_k, placement.experts_per_rank)
    if columns < top_k:
        order_RJ = (ids_RK < 0).int().sort(dim=1, stable=True).indices[:, :columns]
        return weights_RK.gather(1, order_RJ), ids_RK.gather(1, order_RJ)
    return weights_RK, ids_RK
