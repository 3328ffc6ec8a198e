"""Kernels of ``mb_kernels.routing``: top-k, alone or of a softmax, and a stable counting sort.

The sort takes two launches of a bounded number of programs, each with a stretch of slots of its
own: a histogram per program, and a scatter, in which a program sums the histograms before its own,
then sorts its slots block by block in registers. Slots that no expert takes form one more group
behind the experts.

Letters: T tokens, E experts, K top-k, N = T·K slots, G = E + 1 groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import plan_of

# Slots sorted at once: 5.1 us against 10.7 with 1024 (16384 slots), 16.5 against 23.5 (262144).
_BLOCK = 512
_COUNTS = 8192  # counts of programs summed at once
_TAKEN = tl.constexpr(-2147483648)  # below the key of every logit


@triton.jit
def _ordered(x):
    """int32 keys in the order of fp32 x, none of them the smallest int32; -0.0 equals 0.0.

    NaN is above all numbers, as to torch, whatever its bits: a GPU's negated one is -1, whose key
    would be the smallest.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, keys, 0x7FFFFFFF)


@triton.jit
def topk_fwd_kernel(
    x_ptr,  # [T, E], scores or logits
    ids_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] fp32, those of a softmax; or None, for the ids alone
    probs_ptr,  # [T, E] fp32, with weights_ptr
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)[None, :]
    k = tl.arange(0, BLOCK_K)[None, :]
    row = t.to(tl.int64)[:, None]
    live = (t < tokens)[:, None]
    inside = live & (e < E)
    x = tl.load(x_ptr + row * E + e, mask=inside, other=float("-inf")).to(tl.float32)
    if weights_ptr is not None:
        x = tl.where(live, x, 0.0)
        p = tl.where(e < E, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
        p = p / tl.sum(p, 1)[:, None]
        tl.store(probs_ptr + row * E + e, p, mask=inside)
        weights = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)

    key = tl.where(e < E, _ordered(x), _TAKEN)
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for choice in range(K):
        best = tl.max(key, 1)[:, None]
        chosen = tl.min(tl.where(key == best, e, BLOCK_E), 1)[:, None]  # of equal ones the first
        key = tl.where(e == chosen, _TAKEN, key)
        if weights_ptr is not None:
            weight = tl.sum(tl.where(e == chosen, p, 0.0), 1)[:, None]
            weights = tl.where(k == choice, weight, weights)
        ids = tl.where(k == choice, chosen, ids)
    if weights_ptr is not None:
        if RENORMALIZE:
            # Correctly rounded: of one expert a token it is 1, and equal weights stay equal.
            sums = tl.sum(weights, 1)[:, None]
            weights = tl.div_rn(weights, tl.broadcast_to(sums, weights.shape))
        tl.store(weights_ptr + row * K + k, weights, mask=live & (k < K))
    tl.store(ids_ptr + row * K + k, ids, mask=live & (k < K))


@triton.jit
def topk_softmax_bwd_kernel(
    d_weights_ptr,  # [T, K] fp32
    d_probs_ptr,  # [T, E] fp32, or None
    probs_ptr,  # [T, E] fp32
    weights_ptr,  # [T, K] fp32
    ids_ptr,  # [T, K] int32
    d_logits_ptr,  # [T, E] fp32
    tokens,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < tokens
    e = tl.arange(0, BLOCK_E)[None, :]
    row = t.to(tl.int64)
    inside = live[:, None] & (e < E)
    p = tl.load(probs_ptr + row[:, None] * E + e, mask=inside, other=0.0)
    inner = tl.zeros((BLOCK_T,), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    if RENORMALIZE:
        for choice in range(K):
            chosen = tl.load(ids_ptr + row * K + choice, mask=live, other=0)
            weight = tl.load(weights_ptr + row * K + choice, mask=live, other=0.0)
            inner += weight * tl.load(d_weights_ptr + row * K + choice, mask=live, other=0.0)
            total += tl.sum(tl.where(e == chosen[:, None], p, 0.0), 1)
        total = tl.where(live, total, 1.0)
    if d_probs_ptr is not None:
        dp = tl.load(d_probs_ptr + row[:, None] * E + e, mask=inside, other=0.0)
    else:
        dp = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for choice in range(K):
        chosen = tl.load(ids_ptr + row * K + choice, mask=live, other=0)
        d_weight = tl.load(d_weights_ptr + row * K + choice, mask=live, other=0.0)
        if RENORMALIZE:
            d_weight = (d_weight - inner) / total
        dp += tl.where(e == chosen[:, None], d_weight[:, None], 0.0)
    d_logits = p * (dp - tl.sum(dp * p, 1)[:, None])
    tl.store(d_logits_ptr + row[:, None] * E + e, d_logits, mask=inside)


@triton.jit
def _load_groups(ids_ptr, slot, slots, E: tl.constexpr):
    """Group of each slot: its expert, or E if the id is outside 0..E-1."""
    e = tl.load(ids_ptr + slot, mask=slot < slots, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit
def histogram_kernel(
    ids_ptr,  # [N]
    counts_ptr,  # [programs, GROUPS] int32
    slots,
    blocks,  # per program
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    counts = tl.zeros((GROUPS,), tl.int32)
    for block in range(blocks):
        slot = (tl.program_id(0) * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        group = _load_groups(ids_ptr, slot, slots, E)
        counts += tl.histogram(group, GROUPS, mask=slot < slots)
    tl.store(counts_ptr + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), counts)


@triton.jit
def scatter_kernel(
    ids_ptr,  # [N]
    histograms_ptr,  # [programs, GROUPS] int32
    order_ptr,  # [N] int32
    inverse_ptr,  # [N] int32
    counts_ptr,  # [E] int32
    offsets_ptr,  # [E + 1] int32
    slots,
    capacity,
    blocks,  # per program
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,  # histograms summed at once
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    g = tl.arange(0, GROUPS)
    total = tl.zeros((GROUPS,), tl.int32)
    before = tl.zeros((GROUPS,), tl.int32)  # slots of the group in earlier blocks
    for start in range(0, tl.num_programs(0), STEP):
        other = start + tl.arange(0, STEP)[:, None]
        where = histograms_ptr + other * GROUPS + g[None, :]
        counts = tl.load(where, mask=other < tl.num_programs(0), other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < pid, counts, 0), 0)

    kept = tl.where(g < E, tl.minimum(total, capacity), 0)
    last = tl.cumsum(kept, 0)
    all_kept = tl.sum(kept, 0)
    over = total - kept
    dropped_first = all_kept + tl.cumsum(over, 0) - over
    if pid == 0:
        tl.store(counts_ptr + g, total, mask=g < E)
        tl.store(offsets_ptr + g + 1, last, mask=g < E)
        tl.store(offsets_ptr, 0)

    i = tl.arange(0, BLOCK)
    for block in range(blocks):
        first_slot = (pid * blocks + block) * BLOCK
        inside = first_slot + i < slots
        group = _load_groups(ids_ptr, first_slot + i, slots, E)
        here = tl.histogram(group, GROUPS, mask=inside)
        # Slots past the end sort behind everything, so that live slots keep positions 0, 1, ...
        key = tl.sort(tl.where(inside, group, GROUPS) * BLOCK + i)
        group = tl.minimum(key // BLOCK, GROUPS - 1)
        slot = first_slot + key % BLOCK
        # Place within the group: place in the block, less the block's smaller groups, plus the
        # group's slots in earlier blocks.
        place = i + tl.gather(before - (tl.cumsum(here, 0) - here), group, 0)
        limit = tl.gather(kept, group, 0)
        row = tl.gather(last - kept, group, 0) + place
        dropped_row = tl.gather(dropped_first, group, 0) + place - limit
        row = tl.where(place < limit, row, dropped_row)
        tl.store(order_ptr + row, slot, mask=slot < slots)
        tl.store(inverse_ptr + slot, tl.where(place < limit, row, -1), mask=slot < slots)
        before += here


def _block_t(experts: int) -> int:
    """Tokens per program: about 1024 logits."""
    return max(1024 // power_of_two(experts), 1)


def topk_ids(scores: Tensor, k: int) -> Tensor:
    return _topk("scores_TE", scores, k, None, None, renormalize=False)


def topk_softmax(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    weights = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    ids = _topk("logits_TE", logits, k, weights, probs, renormalize=renormalize)
    return weights, ids, probs


def _topk(
    name: str, x: Tensor, k: int, weights: Tensor | None, probs: Tensor | None, *, renormalize: bool
) -> Tensor:
    """The ids; weights and probabilities are written where there is a tensor for them."""
    tokens, experts = x.shape
    require_countable(f"tokens of {name}", tokens)
    ids = x.new_empty((tokens, k), dtype=torch.int32)
    if tokens:
        block_t = _block_t(experts)
        launch(
            topk_fwd_kernel,
            (cdiv(tokens, block_t),),
            *(x, ids, weights, probs, tokens),
            E=experts,
            K=k,
            RENORMALIZE=renormalize,
            BLOCK_T=block_t,
            BLOCK_E=power_of_two(experts),
            BLOCK_K=power_of_two(k),
        )
    return ids


def topk_softmax_backward(
    d_weights: Tensor,
    d_probs: Tensor | None,
    probs: Tensor,
    weights: Tensor,
    ids: Tensor,
    renormalize: bool,
) -> Tensor:
    tokens, experts = probs.shape
    d_logits = torch.empty_like(probs)
    if tokens:
        block_t = _block_t(experts)
        launch(
            topk_softmax_bwd_kernel,
            (cdiv(tokens, block_t),),
            d_weights,
            d_probs,
            probs,
            weights,
            ids,
            d_logits,
            tokens,
            E=experts,
            K=weights.shape[1],
            RENORMALIZE=renormalize,
            BLOCK_T=block_t,
            BLOCK_E=power_of_two(experts),
        )
    return d_logits


def bin_tokens(
    ids: Tensor, num_experts: int, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = ids.numel()
    require_countable("slots of expert_ids_TK", slots)
    order = ids.new_empty(slots, dtype=torch.int32)
    inverse = torch.empty_like(order)
    counts = order.new_empty(num_experts)
    offsets = order.new_empty(num_experts + 1)
    if slots == 0:
        return order, inverse, counts.zero_(), offsets.zero_()
    plan = plan_of(ids)
    block = 64 if plan.interpreted else _BLOCK  # the interpreter sorts slowly
    blocks = cdiv(cdiv(slots, block), plan.units)  # per program
    grid = (cdiv(slots, block * blocks),)
    groups = max(power_of_two(num_experts + 1), 16)
    histograms = order.new_empty(grid[0] * groups)
    sizes = {"E": num_experts, "GROUPS": groups, "BLOCK": block}
    launch(histogram_kernel, grid, ids, histograms, slots, blocks, **sizes)
    launch(
        scatter_kernel,
        grid,
        ids,
        histograms,
        order,
        inverse,
        counts,
        offsets,
        slots,
        slots if capacity is None else min(capacity, slots),
        blocks,
        STEP=max(_COUNTS // groups, 1),
        **sizes,
    )
    return order, inverse, counts, offsets
