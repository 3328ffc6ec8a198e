"""``pack_routing`` and ``unpack_routing`` in plain PyTorch.

Letters: T tokens, K top-k, E experts, P ranks, C destinations of a token at most, R received rows,
J choices of a token on a rank at most.
"""

import torch
from torch import Tensor


def spread(experts: int, ranks: int) -> tuple[int, int]:
    """Experts on a rank, and ranks that hold an expert together; one of the two is 1."""
    return max(experts // ranks, 1), max(ranks // experts, 1)


def most_destinations(top_k: int, experts: int, ranks: int) -> int:
    """C: the most ranks that one token can have to reach."""
    _, sharing = spread(experts, ranks)
    return min(top_k, ranks // sharing) * sharing


def pack_routing(
    weights_TK: Tensor, expert_ids_TK: Tensor, experts: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words [T, 2K], destinations [T, C], and tokens per expert with their sum behind, [E + 1]."""
    known_TK = (expert_ids_TK >= 0) & (expert_ids_TK < experts)
    ids_TK = torch.where(known_TK, expert_ids_TK, -1).int()
    words_TW = torch.cat((weights_TK, ids_TK.to(weights_TK.dtype)), dim=1)
    every_E = torch.arange(experts, dtype=torch.int32, device=ids_TK.device)
    counts_E = (ids_TK.reshape(-1, 1) == every_E).sum(dim=0, dtype=torch.int32)
    counts = torch.cat((counts_E, counts_E.sum(dim=0, keepdim=True, dtype=torch.int32)))
    return words_TW, _destinations(ids_TK, experts, ranks), counts


def _destinations(ids_TK: Tensor, experts: int, ranks: int) -> Tensor:
    per_rank, sharing = spread(experts, ranks)
    groups, top_k = ranks // sharing, ids_TK.shape[1]
    # Ranks that share an expert make a group.
    group_TK = torch.where(ids_TK < 0, -1, ids_TK // per_rank)
    if groups <= top_k:
        every_G = torch.arange(groups, dtype=torch.int32, device=ids_TK.device)
        needed_TG = (group_TK[:, None] == every_G[:, None]).any(dim=2)
        group_TC = torch.where(needed_TG, every_G, -1)
    else:
        same_TKK = group_TK[:, :, None] == group_TK[:, None, :]
        # An earlier choice goes there already.
        group_TC = group_TK.masked_fill(same_TKK.tril(-1).any(dim=2), -1)
    shards = torch.arange(sharing, dtype=torch.int32, device=ids_TK.device)
    rank_TCs = group_TC[:, :, None] * sharing + shards
    return torch.where(group_TC[:, :, None] >= 0, rank_TCs, -1).flatten(1)


def unpack_routing(
    words_RW: Tensor, counts_P: Tensor | None, first: int, per_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and local ids [R, J], columns [R, K], of ``per_rank`` experts from ``first`` on."""
    rows, top_k = words_RW.shape[0], words_RW.shape[1] // 2
    weights_RK, ids_RK = words_RW.split(top_k, dim=1)
    mine_RK = (ids_RK >= first) & (ids_RK < first + per_rank)
    if counts_P is not None:
        place_M = torch.arange(rows // counts_P.shape[0], device=words_RW.device)
        mine_RK = mine_RK & (place_M < counts_P[:, None]).view(-1, 1)
    weights_RK = torch.where(mine_RK, weights_RK, 0)
    ids_RK = torch.where(mine_RK, ids_RK - first, -1).int()
    column_J = torch.arange(min(top_k, per_rank), dtype=torch.int32, device=words_RW.device)
    if top_k <= per_rank:
        return weights_RK, ids_RK, torch.where(mine_RK, column_J, -1)
    chosen_RKJ = ids_RK[:, :, None] == column_J
    weights_RJ = torch.where(chosen_RKJ, weights_RK[:, :, None], 0).sum(dim=1)
    return weights_RJ, torch.where(chosen_RKJ.any(dim=1), column_J, -1), ids_RK


def unpack_routing_backward(d_weights_RJ: Tensor, columns_RK: Tensor) -> Tensor:
    """[R, K]: the gradient of each choice's column, 0 for choices of other ranks."""
    d_RK = d_weights_RJ.gather(1, columns_RK.clamp(min=0).long())
    return torch.where(columns_RK < 0, 0, d_RK)
