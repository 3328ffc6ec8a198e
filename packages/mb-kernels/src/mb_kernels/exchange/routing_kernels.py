"""Kernels of ``pack_routing`` and ``unpack_routing``: one pass over [T, K], a row per token.

Letters: T tokens, K top-k, E experts, C destinations of a token, R received rows, J choices of a
token on a rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.exchange.routing_reference import most_destinations, spread
from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two

# Of a program, eight per thread of 4 warps. Other sizes were not timed: the launch is most of it.
_SLOTS = 1024


@triton.jit
def pack_routing_kernel(
    weights_ptr,  # [T, K]
    ids_ptr,  # [T, K]
    words_ptr,  # [T, 2K]
    peers_ptr,  # [T, C] int32
    counts_ptr,  # [E + 1] int32, zeros
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PER_RANK: tl.constexpr,
    SHARING: tl.constexpr,  # ranks that hold an expert together
    BY_GROUP: tl.constexpr,  # a column for each group of ranks; else one for each choice
    BINS: tl.constexpr,  # a power of two above E
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = t.to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    live = t < tokens
    inside = live[:, None] & (k < K)
    ids = tl.load(ids_ptr + row[:, None] * K + k, mask=inside, other=-1)
    known = (ids >= 0) & (ids < E)
    ids = tl.where(known, ids, -1).to(tl.int32)
    weights = tl.load(weights_ptr + row[:, None] * K + k, mask=inside, other=0.0)
    words = words_ptr + row[:, None] * (2 * K) + k
    tl.store(words, weights, mask=inside)
    tl.store(words + K, ids.to(tl.float32), mask=inside)

    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.reshape(tl.where(known, ids, E), (BLOCK_T * BLOCK_K,)), BINS)
    counts = tl.where(bins < E, counts, 0)
    # Sums of integers: whatever the order, the same bits.
    tl.atomic_add(counts_ptr + bins, counts, mask=counts > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + E, tl.sum(counts, 0), sem="relaxed")

    group = tl.where(known, ids // PER_RANK, -1)
    for c in range(C // SHARING):
        if BY_GROUP:
            to = tl.where(tl.max((group == c).to(tl.int32), 1) > 0, c, -1)
        else:
            to = tl.sum(tl.where(k == c, group, 0), 1)
            earlier = (group == to[:, None]) & (k < c)
            to = tl.where(tl.max(earlier.to(tl.int32), 1) > 0, -1, to)
        for shard in range(SHARING):
            peer = tl.where(to >= 0, to * SHARING + shard, -1)
            tl.store(peers_ptr + row * C + c * SHARING + shard, peer, mask=live)


@triton.jit
def unpack_routing_fwd_kernel(
    words_ptr,  # [R, 2K]
    came_ptr,  # [P] integers or None: of a part of `room` rows, so many came
    weights_ptr,  # [R, J]
    ids_ptr,  # [R, J] int32
    columns_ptr,  # [R, K] int32
    rows,
    room,
    first,
    PER_RANK: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < rows
    row = r.to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    came = live
    if came_ptr is not None:
        came = live & (r % room < tl.load(came_ptr + r // room, mask=live, other=0))
    mask = came[:, None] & (k < K)
    words = words_ptr + row[:, None] * (2 * K) + k
    weights = tl.load(words, mask=mask, other=0.0)
    ids = tl.load(words + K, mask=mask, other=-1.0).to(tl.int32) - first
    mine = mask & (ids >= 0) & (ids < PER_RANK)
    column = tl.where(mine, ids if PER_RANK < K else k, -1)
    tl.store(columns_ptr + row[:, None] * K + k, column, mask=live[:, None] & (k < K))
    for j in range(J):
        chosen = column == j
        weight = tl.sum(tl.where(chosen, weights, 0.0), 1)
        tl.store(weights_ptr + row * J + j, weight, mask=live)
        tl.store(ids_ptr + row * J + j, tl.max(tl.where(chosen, ids, -1), 1), mask=live)


@triton.jit
def unpack_routing_bwd_kernel(
    d_weights_ptr,  # [R, J]
    columns_ptr,  # [R, K] int32
    d_words_ptr,  # [R, K]
    choices,  # R K
    K: tl.constexpr,
    J: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns_ptr + i, mask=i < choices, other=-1)
    d_weight = tl.load(d_weights_ptr + i // K * J + column, mask=column >= 0, other=0.0)
    tl.store(d_words_ptr + i, d_weight, mask=i < choices)


def _blocks(top_k: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    block_k = power_of_two(top_k)
    return max(_SLOTS // block_k, 1), block_k


def pack_routing(
    weights: Tensor, ids: Tensor, experts: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, top_k = weights.shape
    require_countable("tokens of weights_TK", tokens)
    block_t, block_k = _blocks(top_k)
    per_rank, sharing = spread(experts, ranks)
    columns = most_destinations(top_k, experts, ranks)
    words = weights.new_empty((tokens, 2 * top_k))
    peers = ids.new_empty((tokens, columns), dtype=torch.int32)
    counts = ids.new_zeros(experts + 1, dtype=torch.int32)
    if tokens:
        launch(
            pack_routing_kernel,
            (cdiv(tokens, block_t),),
            *(weights, ids, words, peers, counts, tokens),
            E=experts,
            K=top_k,
            C=columns,
            PER_RANK=per_rank,
            SHARING=sharing,
            BY_GROUP=ranks // sharing <= top_k,
            BINS=max(power_of_two(experts + 1), 16),
            BLOCK_T=block_t,
            BLOCK_K=block_k,
        )
    return words, peers, counts


def unpack_routing(
    words: Tensor, counts: Tensor | None, first: int, per_rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, top_k = words.shape[0], words.shape[1] // 2
    weights = words.new_empty((rows, min(top_k, per_rank)))
    ids = torch.empty_like(weights, dtype=torch.int32)
    columns = ids.new_empty((rows, top_k))
    if rows:
        block_r, block_k = _blocks(top_k)
        launch(
            unpack_routing_fwd_kernel,
            (cdiv(rows, block_r),),
            *(words, counts, weights, ids, columns, rows),
            *(rows if counts is None else rows // counts.shape[0], first),
            PER_RANK=per_rank,
            K=top_k,
            J=weights.shape[1],
            BLOCK_R=block_r,
            BLOCK_K=block_k,
        )
    return weights, ids, columns


def unpack_routing_backward(d_weights: Tensor, columns: Tensor) -> Tensor:
    d_words = d_weights.new_empty(columns.shape)
    if columns.numel():
        launch(
            unpack_routing_bwd_kernel,
            (cdiv(columns.numel(), _SLOTS),),
            *(d_weights, columns, d_words, columns.numel()),
            K=columns.shape[1],
            J=d_weights.shape[1],
            BLOCK=_SLOTS,
        )
    return d_words
