"""Kernels of ``mb_kernels.router_losses``.

Forward: as many programs as the GPU has units each add up the probabilities per expert, lse^2 and
the entropy over their share of the tokens; one program then adds their sums, in a fixed order, and
writes the scalars. Backward: one pass over the probabilities.

Letters: T tokens, E experts, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import plan_of

_BLOCK = 4096  # logits a program holds at once: 32 per thread of 4 warps


@triton.jit
def _log_shares(x, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Log of sigmoids over their sum, rows of E: a token's sigmoids can all underflow."""
    log_s = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
    log_s = tl.where((tl.arange(0, BLOCK_E) < E)[None, :], log_s, float("-inf"))
    log_s -= tl.max(log_s, 1)[:, None]
    return log_s - tl.log(tl.sum(tl.exp(log_s), 1))[:, None]


@triton.jit
def router_sums_fwd_kernel(
    logits_ptr,  # [T, E]
    mask_ptr,  # [T] uint8, 0 for padding, or None
    sums_ptr,  # [P, BLOCK_E] fp32: sum of probabilities per expert
    scalars_ptr,  # [P, 3] fp32: sum of lse^2, sum of entropy, tokens that count
    lse_ptr,  # [T] fp32
    tokens,
    SIGMOID: tl.constexpr,  # probabilities: sigmoids over their sum, not the softmax
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    entropies = tl.zeros((BLOCK_T,), tl.float32)
    counted = tl.zeros((BLOCK_T,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        live = t < tokens
        inside = live[:, None] & (e < E)[None, :]
        at = t.to(tl.int64)[:, None] * E + e[None, :]
        x = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(live[:, None], x, 0.0)
        largest = tl.max(x, 1)
        exps = tl.where((e < E)[None, :], tl.exp(x - largest[:, None]), 0.0)
        total = tl.sum(exps, 1)
        log_total = tl.log(total)
        lse = largest + log_total
        tl.store(lse_ptr + t, lse, mask=live)
        if mask_ptr is not None:
            live = live & (tl.load(mask_ptr + t, mask=live, other=0) != 0)
        counted += live.to(tl.float32)
        if SIGMOID:
            log_p = _log_shares(x, E, BLOCK_E)
            p = tl.where(live[:, None], tl.exp(log_p), 0.0)
        else:
            p = tl.where(live[:, None], exps / total[:, None], 0.0)
            # Not x - lse: of large logits lse has lost the logarithm.
            log_p = x - largest[:, None] - log_total[:, None]
        sums += tl.sum(p, 0)
        squares += tl.where(live, lse * lse, 0.0)
        # p log p is 0 where p underflows to 0
        entropies -= tl.sum(tl.where(p > 0, p * log_p, 0.0), 1)
    tl.store(sums_ptr + tl.program_id(0) * BLOCK_E + e, sums)
    tl.store(scalars_ptr + tl.program_id(0) * 3, tl.sum(squares, 0))
    tl.store(scalars_ptr + tl.program_id(0) * 3 + 1, tl.sum(entropies, 0))
    tl.store(scalars_ptr + tl.program_id(0) * 3 + 2, tl.sum(counted, 0))


@triton.jit
def router_scalars_fwd_kernel(
    sums_ptr,  # [P, BLOCK_E] fp32
    scalars_ptr,  # [P, 3] fp32
    balance_counts_ptr,  # [E] integers
    counts_ptr,  # [E] integers
    kept_ptr,  # [] integer
    num_tokens_ptr,  # [] number to divide by, or None: the tokens that count
    slots_ptr,  # [] integer, or None: the sum of the counts
    aux_ptr,
    balance_ptr,
    z_ptr,
    entropy_ptr,
    imbalance_ptr,
    dropped_ptr,
    divisor_ptr,  # seven scalars, fp32
    parts,
    balance_weight,
    z_weight,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    sums = tl.zeros((BLOCK_E,), tl.float32)
    squares = 0.0
    entropy = 0.0
    tokens = 0.0
    for part in range(parts):
        sums += tl.load(sums_ptr + part * BLOCK_E + e)
        squares += tl.load(scalars_ptr + part * 3)
        entropy += tl.load(scalars_ptr + part * 3 + 1)
        tokens += tl.load(scalars_ptr + part * 3 + 2)
    if num_tokens_ptr is not None:
        tokens = tl.load(num_tokens_ptr).to(tl.float32)
    tokens = tl.where(tokens == 0.0, 1.0, tokens)
    load = tl.load(balance_counts_ptr + e, mask=e < E, other=0).to(tl.float32)
    load = load / tl.maximum(tl.sum(load, 0), 1.0)
    balance = E * tl.sum(load * sums, 0) / tokens
    z = squares / tokens
    counts = tl.load(counts_ptr + e, mask=e < E, other=0).to(tl.float32)
    meant = tl.sum(counts, 0)
    if slots_ptr is not None:
        meant = tl.load(slots_ptr).to(tl.float32)
    kept = tl.load(kept_ptr).to(tl.float32)
    slots = tl.maximum(meant, 1.0)
    # A loss of no weight adds nothing, be it infinite: lse^2 is from 1.8e19 on.
    weighted_balance = tl.where(balance_weight == 0.0, 0.0, balance_weight * balance)
    tl.store(aux_ptr, weighted_balance + tl.where(z_weight == 0.0, 0.0, z_weight * z))
    tl.store(balance_ptr, balance)
    tl.store(z_ptr, z)
    tl.store(entropy_ptr, entropy / tokens)
    tl.store(imbalance_ptr, tl.max(counts, 0) * E / slots)
    tl.store(dropped_ptr, (meant - kept) / slots)
    tl.store(divisor_ptr, tokens)


@triton.jit
def router_losses_bwd_kernel(
    d_aux_ptr,  # [] fp32
    kept_ptr,  # [T, E] probabilities in fp32, or the logits of sigmoids
    balance_counts_ptr,  # [E] integers
    lse_ptr,  # [T] fp32
    divisor_ptr,  # [] fp32
    mask_ptr,  # [T] uint8, or None
    d_logits_ptr,  # [T, E] fp32
    tokens,
    balance_scale,  # load_balancing_weight E
    z_scale,  # 2 z_weight
    SIGMOID: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < tokens)[:, None] & (e < E)[None, :]
    at = t.to(tl.int64)[:, None] * E + e[None, :]
    load = tl.load(balance_counts_ptr + e, mask=e < E, other=0).to(tl.float32)
    c = balance_scale * load / tl.maximum(tl.sum(load, 0), 1.0)
    kept = tl.load(kept_ptr + at, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + t, mask=t < tokens, other=0.0)[:, None]
    if SIGMOID:
        p = tl.exp(_log_shares(kept, E, BLOCK_E))
        slope = p * tl.sigmoid(-kept) * (c[None, :] - tl.sum(p * c[None, :], 1)[:, None])
        slope += z_scale * lse * tl.exp(kept - lse)
    else:
        slope = kept * (c[None, :] - tl.sum(kept * c[None, :], 1)[:, None] + z_scale * lse)
    d_logits = tl.load(d_aux_ptr) / tl.load(divisor_ptr) * slope
    if mask_ptr is not None:
        counts = tl.load(mask_ptr + t, mask=t < tokens, other=0) != 0
        d_logits = tl.where(counts[:, None], d_logits, 0.0)
    tl.store(d_logits_ptr + at, d_logits, mask=inside)


def _blocks(experts: int) -> tuple[int, int]:
    """BLOCK_T and BLOCK_E."""
    block_e = power_of_two(experts)
    return max(_BLOCK // block_e, 1), block_e


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def router_losses(
    logits: Tensor,
    probs: Tensor | None,
    balance_counts: Tensor,
    counts: Tensor,
    kept: Tensor,
    mask: Tensor | None,
    num_tokens: Tensor | None,
    slots: Tensor | None,
    balance_weight: float,
    z_weight: float,
    sigmoid: bool,
) -> tuple[Tensor, ...]:
    tokens, experts = logits.shape
    require_countable("tokens of logits_TE", tokens)
    block_t, block_e = _blocks(experts)
    parts = min(cdiv(tokens, block_t), plan_of(logits).parts)
    sums = logits.new_empty((parts, block_e), dtype=torch.float32)
    scalars = sums.new_empty((parts, 3))
    lse = sums.new_empty(tokens)
    *results, divisor = [sums.new_empty(()) for _ in range(7)]
    if tokens:
        launch(
            router_sums_fwd_kernel,
            (parts,),
            logits,
            _bytes(mask),
            sums,
            scalars,
            lse,
            tokens,
            SIGMOID=sigmoid,
            E=experts,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    launch(
        router_scalars_fwd_kernel,
        (1,),
        sums,
        scalars,
        balance_counts,
        counts,
        kept,
        num_tokens,
        slots,
        *results,
        divisor,
        parts,
        balance_weight,
        z_weight,
        E=experts,
        BLOCK_E=block_e,
    )
    return *results, lse, divisor


def router_losses_backward(
    d_aux: Tensor,
    kept: Tensor,
    balance_counts: Tensor,
    lse: Tensor,
    divisor: Tensor,
    mask: Tensor | None,
    balance_weight: float,
    z_weight: float,
    sigmoid: bool,
) -> Tensor:
    tokens, experts = kept.shape
    d_logits = torch.empty_like(kept, dtype=torch.float32)
    if tokens:
        block_t, block_e = _blocks(experts)
        launch(
            router_losses_bwd_kernel,
            (cdiv(tokens, block_t),),
            d_aux,
            kept,
            balance_counts,
            lse,
            divisor,
            _bytes(mask),
            d_logits,
            tokens,
            balance_weight * experts,
            2 * z_weight,
            SIGMOID=sigmoid,
            E=experts,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return d_logits
