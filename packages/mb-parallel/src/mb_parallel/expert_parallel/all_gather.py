"""Expert parallelism by gathering: every rank sees all tokens and computes its own experts on them.

Shapes do not depend on the routing, so nothing is read back to the host, no buffer overflows, and a
CUDA graph can hold the layer. It moves (P - 1) copies of a token whatever its choices: right where
a token reaches most ranks anyway, top_k >= 2 P, and wasteful for top-1 on many ranks.

Letters: T tokens, D hidden, K top-k, P ranks, G = P T gathered tokens.
"""

from __future__ import annotations

import mb_kernels
import torch.nn.functional as F
from mb_layers.dispatch import Dispatched
from mb_layers.tensors import cast_alike
from torch import Tensor

from mb_parallel.expert_parallel.collectives import (
    Place,
    gather_rows,
    longest_of_ranks,
    sum_rows,
)
from mb_parallel.expert_parallel.placement import Placement
from mb_parallel.expert_parallel.rows import Rows


class AllGatherDispatcher:
    """Gathers the tokens of all ranks, and sums what their experts made of them.

    Args:
        num_experts: E of the layer.
        place: the expert-parallel group.
        equal_tokens: every rank always brings as many tokens. False: ranks tell each other how
            many, which makes the host wait for the device, and pad to the longest.
        rows: how much room the experts make; None: for the worst case.
    """

    def __init__(
        self,
        num_experts: int,
        place: Place,
        *,
        equal_tokens: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.num_experts = num_experts
        self.place = place
        self.equal_tokens = equal_tokens
        self.rows = rows or Rows()
        self.placement = Placement(num_experts, place.size, place.rank)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Gather tokens and routing; bins hold the slots of this rank's experts."""
        tokens, top_k = expert_ids_TK.shape
        (x_TD,) = cast_alike(x_TD)  # autocast's dtype travels, not fp32
        longest = tokens if self.equal_tokens else longest_of_ranks(tokens, self.place, x_TD.device)
        words_TW, _, counts_E, slots = self.placement.pack(weights_TK, expert_ids_TK)
        if longest > tokens:
            x_TD = F.pad(x_TD, (0, 0, 0, longest - tokens))
            words_TW = F.pad(words_TW, (0, 0, 0, longest - tokens), value=-1.0)  # ids of no expert
        x_GD = gather_rows(x_TD, self.place)
        weights_GJ, ids_GJ, _ = self.placement.unpack(gather_rows(words_TW, self.place))
        bins = mb_kernels.bin_tokens(ids_GJ, self.placement.experts_per_rank)
        most = self.rows.most(bins, self.placement, x_GD.shape[0], top_k)
        return Dispatched(x_GD, weights_GJ, bins, counts_E, slots, tokens, most)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum over the ranks what their experts made of this rank's tokens."""
        return sum_rows(y_RD, self.place)[: dispatched.state]
