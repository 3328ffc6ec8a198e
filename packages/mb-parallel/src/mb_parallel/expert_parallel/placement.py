"""Which rank holds which experts, and which ranks a token has to reach.

With E experts on P ranks, rank r holds the E / P experts from r E / P on. If there are more ranks
than experts, an expert's width F is cut into P / E parts, held by neighbouring ranks. A token that
chose the expert goes to all of them, and their outputs add up.

    E = 4, P = 2:  rank 0: experts 0, 1      E = 2, P = 4:  rank 0: expert 0, F first half
                   rank 1: experts 2, 3                     rank 1: expert 0, F second half
                                                            rank 2: expert 1, F first half  ...

Letters: T tokens, K top-k, E experts, P ranks, R received rows, W words of routing, J choices of a
token on a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from mb_kernels.exchange import PackedRouting, pack_routing, spread, unpack_routing
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
        return spread(self.num_experts, self.ranks)[0]

    @property
    def width_shards(self) -> int:
        """Ranks that share the width of one expert; 1 unless there are more ranks than experts."""
        return spread(self.num_experts, self.ranks)[1]

    def balanced_slots(self, tokens: int, top_k: int) -> float:
        """This rank's slots if the `tokens` of all ranks load the experts evenly."""
        return tokens * top_k * self.experts_per_rank / self.num_experts

    def pack(self, weights_TK: Tensor, expert_ids_TK: Tensor) -> PackedRouting:
        """Where each token goes, and with which choices, see `mb_kernels.exchange`."""
        return pack_routing(
            weights_TK, expert_ids_TK, num_experts=self.num_experts, ranks=self.ranks
        )

    def unpack(
        self, words_RW: Tensor, counts_P: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and local ids [R, J] of the choices on this rank, and columns, see there."""
        sizes = {"num_experts": self.num_experts, "ranks": self.ranks, "rank": self.rank}
        return unpack_routing(words_RW, **sizes, counts_P=counts_P)
