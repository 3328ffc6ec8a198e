"""Expert parallelism in fixed shapes, for layers with a capacity: C rows from a rank to an expert.

An expert's capacity counts a rank's own tokens, as in GShard and Megatron Core. So every rank sends
C rows to every expert, some of them empty, and all ranks know this beforehand. One exchange brings
the rows to the experts and one brings the results back. No counts are exchanged, the host reads
nothing back, and a CUDA graph can hold the layer on any backend.

    E = 4 experts on P = 2 ranks, C = 3       to rank 0       |  to rank 1
    rows that a rank sends, - for empty:      a c -   b d e   |  - - -   a f -

So which tokens are dropped depends on how they are spread over ranks. `GlobalCapacity` counts the
tokens of all ranks instead. There an expert may get all of its rows from one rank, and fixed shapes
would need room for every token on every rank, as in `AllGatherDispatcher`.

Letters: T tokens, D hidden, E experts, K top-k, N = T K slots, P ranks, s ranks per expert,
C capacity, J = K s places of a token, M = T J of all, R = E s C rows sent, and received.
"""

from __future__ import annotations

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels import Bins
from mb_layers.dispatch import Dispatched, LocalDispatcher, replaced
from mb_layers.tensors import cast_alike
from torch import Tensor

from mb_parallel.expert_parallel.collectives import Place, exchange_rows, longest_of_ranks
from mb_parallel.expert_parallel.placement import Placement


class FixedDispatcher:
    """Sends every expert as many rows as its capacity, whatever the routing.

    A token is sent to each of its experts, and its own rank weights the results, so that no routing
    is sent. The experts compute on empty rows too.

    Args:
        local: chooses which slots are dropped, by the capacity of an expert for one rank's tokens.
        place: the expert-parallel group.
        equal_tokens: all ranks always bring the same number of tokens. False: they exchange their
            numbers, for which the host waits for the device, and pad to the longest.
    """

    def __init__(self, local: LocalDispatcher, place: Place, *, equal_tokens: bool = False) -> None:
        self.local = local
        self.place = place
        self.equal_tokens = equal_tokens
        self.placement = Placement(local.num_experts, place.size, place.rank)

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Send C rows to each expert; bins hold all rows that came, one slot each."""
        (x_TD,) = cast_alike(x_TD)  # autocast's dtype travels, not fp32
        tokens, top_k = expert_ids_TK.shape
        longest = tokens if self.equal_tokens else longest_of_ranks(tokens, self.place, x_TD.device)
        if longest > tokens:
            padding = (0, 0, 0, longest - tokens)
            x_TD, weights_TK = F.pad(x_TD, padding), F.pad(weights_TK, padding)
            expert_ids_TK = F.pad(expert_ids_TK, padding, value=-1)
        local = self.local.dispatch(x_TD, weights_TK, expert_ids_TK)
        assert self.local.capacity is not None
        limit = min(self.local.capacity.of(longest * top_k), longest * top_k)
        shards = self.placement.width_shards
        sent = _in_fixed_places(local.bins, expert_ids_TK, limit, shards)
        # The gradient of a dropped slot's weight is not written.
        kept_TK = local.bins.inverse_N.view_as(expert_ids_TK) >= 0
        weights_TK = torch.where(kept_TK, weights_TK, 0)
        weights_TJ = weights_TK.repeat_interleave(shards, dim=1)
        rows_RD = self._exchange(mb_kernels.gather(x_TD, sent, weights_TJ.shape[1]))
        experts = self.placement.experts_per_rank
        ids_R = torch.arange(experts, dtype=torch.int32, device=x_TD.device)
        ids_R = ids_R.repeat_interleave(limit).repeat(self.place.size)
        bins = mb_kernels.bin_tokens(ids_R[:, None], experts)
        ones_R1 = torch.ones_like(ids_R, dtype=weights_TK.dtype)[:, None]
        state = (sent, weights_TJ, tokens)
        return replaced(local, x_RD=rows_RD, weights_RK=ones_R1, bins=bins, state=state)

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the rows back, and sum each token's, weighted."""
        sent, weights_TJ, tokens = dispatched.state
        return mb_kernels.combine(self._exchange(y_RD), sent, weights_TJ)[:tokens]

    def _exchange(self, rows_RD: Tensor) -> Tensor:
        """Send equally many rows to each rank; the way back is the same exchange."""
        split = [rows_RD.shape[0] // self.place.size] * self.place.size
        return exchange_rows(rows_RD, split, split, self.place)


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
