"""Triton kernels of attention with a bias by distance: FlashAttention-2 (arXiv 2307.08691).

A program owns a block of queries, or of keys, of one segment and head. For each tile it reads the
bias at the tile's distances, and -inf for keys that a query may not see.

The gradient of the bias sums the scores' gradients along diagonals, over all segments. It has its
own kernel, because in the others a program meets another diagonal at each step. A program of this
kernel computes all tiles on one diagonal of blocks again. They have the same distances, so their
sum stays in registers, and is summed by distance once, at the end.

Of a token's softmax are kept its highest score, the peak, and the logarithm of the sum of
exponentials relative to it, the total. FlashAttention keeps the sum of the two, which loses the
second where scores are large: at 1e4 its fourth digit, at 1e8 all of it.

Grids are large enough for the longest possible segment, because the host does not know the lengths.
Programs beyond the end of a segment end at once.

Letters: T tokens, H query heads, G key-value heads, C width of a head, N segments, S the longest
segment there may be, A = 2 S - 1 distances.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.language.heads import load, rows_of, store
from mb_kernels.relative_attention.tiles import numbers_of, product, scores, segment_of
from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets.table import TILES

_LOG2E = tl.constexpr(1.4426950408889634)
# Programs that share the segments of a diagonal; with more, more sums are added up afterwards.
_SHARES = 8

# Specialising for them would make no code faster, and they may differ at each step of a run.
_SIZES = ("T", "S", "BLOCKS", "N")


@triton.jit(do_not_specialize=_SIZES)
def attention_fwd_kernel(
    q, k, v, bias, offsets,  # [T, H, C], [T, G, C] twice, [H, A], [N + 1]
    y, peaks, totals,  # written: [T, H, C]; [H, T] fp32 both, totals as logarithms to base 2
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = segment_of(offsets, BLOCKS, BLOCK_Q)
    if first >= length:
        return
    head = tl.program_id(1)
    group = head // (H // G)
    q, y = rows_of(q, start, head, H, C), rows_of(y, start, head, H, C)
    k, v = rows_of(k, start, group, G, C), rows_of(v, start, group, G, C)
    bias += head * (2 * S - 1)
    query = first + tl.arange(0, BLOCK_Q)
    q_block = load(q, first, length, H, C, BLOCK_Q, BLOCK_C)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    end = tl.minimum(length, first + BLOCK_Q) if CAUSAL else length
    for at in range(0, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        k_block = load(k, at, length, G, C, BLOCK_K, BLOCK_C)
        v_block = load(v, at, length, G, C, BLOCK_K, BLOCK_C)
        s = product(q_block, k_block, q, k, first, at, length, H, G, C, PRECISION, PART)
        s = scores(s, bias, query[:, None], key[None, :], length, scale, S, CAUSAL)
        peak_now = tl.maximum(peak, tl.max(s, 1))
        # Of a query that has seen nothing yet the peak is -inf, and so are its scores.
        base = tl.where(peak_now == float("-inf"), 0.0, peak_now)
        shrink = tl.exp(peak - base)
        p = tl.exp(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * shrink[:, None], input_precision=PRECISION)
        peak = peak_now
    # One that sees nothing at all has a peak of 0 and, instead of 0, a total of 1.
    seen = peak != float("-inf")
    total = tl.where(seen, total, 1.0)
    store(y, acc / total[:, None], first, length, H, C)
    row = tl.cast(head, tl.int64) * T + start + query
    tl.store(peaks + row, tl.where(seen, peak, 0.0), mask=query < length)
    tl.store(totals + row, tl.log2(total), mask=query < length)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dq_kernel(
    q, k, v, bias, offsets, dy, y, peaks, totals,
    dq, means,  # written: [T, H, C]; [H, T] fp32, sum(dy y), which the others read
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = segment_of(offsets, BLOCKS, BLOCK_Q)
    if first >= length:
        return
    head = tl.program_id(1)
    group = head // (H // G)
    q, dq = rows_of(q, start, head, H, C), rows_of(dq, start, head, H, C)
    k, v = rows_of(k, start, group, G, C), rows_of(v, start, group, G, C)
    y, dy = rows_of(y, start, head, H, C), rows_of(dy, start, head, H, C)
    row = tl.cast(head, tl.int64) * T + start
    bias += head * (2 * S - 1)
    query = first + tl.arange(0, BLOCK_Q)
    dy_block = load(dy, first, length, H, C, BLOCK_Q, BLOCK_C)
    y_block = load(y, first, length, H, C, BLOCK_Q, BLOCK_C)
    mean = tl.sum(dy_block.to(tl.float32) * y_block.to(tl.float32), 1)
    tl.store(means + row + query, mean, mask=query < length)
    q_block = load(q, first, length, H, C, BLOCK_Q, BLOCK_C)
    peak = numbers_of(peaks + row, query, length)
    total = numbers_of(totals + row, query, length)
    acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    end = tl.minimum(length, first + BLOCK_Q) if CAUSAL else length
    for at in range(0, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        k_block = load(k, at, length, G, C, BLOCK_K, BLOCK_C)
        v_block = load(v, at, length, G, C, BLOCK_K, BLOCK_C)
        s = product(q_block, k_block, q, k, first, at, length, H, G, C, PRECISION, PART)
        s = scores(s, bias, query[:, None], key[None, :], length, scale, S, CAUSAL)
        dp = product(dy_block, v_block, dy, v, first, at, length, H, G, C, PRECISION, PART)
        p = tl.exp2((s - peak[:, None]) * _LOG2E - total[:, None])
        ds = p * (dp - mean[:, None])
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision=PRECISION)
    store(dq, acc * scale, first, length, H, C)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dkv_kernel(
    q, k, v, bias, offsets, dy, peaks, totals, means,
    dk, dv,  # written: [T, G, C] both
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = segment_of(offsets, BLOCKS, BLOCK_K)
    if first >= length:
        return
    group = tl.program_id(1)
    k, dk = rows_of(k, start, group, G, C), rows_of(dk, start, group, G, C)
    v, dv = rows_of(v, start, group, G, C), rows_of(dv, start, group, G, C)
    key = first + tl.arange(0, BLOCK_K)
    k_block = load(k, first, length, G, C, BLOCK_K, BLOCK_C)
    v_block = load(v, first, length, G, C, BLOCK_K, BLOCK_C)
    dk_acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    dv_acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    begin = first // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    for head in range(group * (H // G), (group + 1) * (H // G)):
        q_h, dy_h = rows_of(q, start, head, H, C), rows_of(dy, start, head, H, C)
        row = tl.cast(head, tl.int64) * T + start
        bias_h = bias + head * (2 * S - 1)
        for at in range(begin, length, BLOCK_Q):
            query = at + tl.arange(0, BLOCK_Q)
            q_block = load(q_h, at, length, H, C, BLOCK_Q, BLOCK_C)
            dy_block = load(dy_h, at, length, H, C, BLOCK_Q, BLOCK_C)
            peak = numbers_of(peaks + row, query, length)
            total = numbers_of(totals + row, query, length)
            mean = numbers_of(means + row, query, length)
            # Keys are rows here, so that what multiplies queries need not be turned.
            s = product(k_block, q_block, k, q_h, first, at, length, G, H, C, PRECISION, PART)
            s = scores(s, bias_h, query[None, :], key[:, None], length, scale, S, CAUSAL)
            p = tl.exp2((s - peak[None, :]) * _LOG2E - total[None, :])
            dv_acc = tl.dot(p.to(dy_block.dtype), dy_block, dv_acc, input_precision=PRECISION)
            dp = product(v_block, dy_block, v, dy_h, first, at, length, G, H, C, PRECISION, PART)
            ds = p * (dp - mean[None, :])
            dk_acc = tl.dot(ds.to(q_block.dtype), q_block, dk_acc, input_precision=PRECISION)
    store(dk, dk_acc * scale, first, length, G, C)
    store(dv, dv_acc, first, length, G, C)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dbias_kernel(
    q, k, v, bias, offsets, dy, peaks, totals, means,
    sums,  # written: [shares, 2, H, 2 BLOCKS BLOCK] fp32, by distance from -BLOCKS BLOCK on
    scale, T, S, BLOCKS, N,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    group = head // (H // G)
    bias += head * (2 * S - 1)
    diagonal = tl.program_id(0)
    apart = (diagonal - BLOCKS + 1) * BLOCK  # from the first query to the first key of a tile
    place = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for segment in range(tl.program_id(2), N, tl.num_programs(2)):
        start = tl.load(offsets + segment)
        length = (tl.load(offsets + segment + 1) - start).to(tl.int32)
        q_n, dy_n = rows_of(q, start, head, H, C), rows_of(dy, start, head, H, C)
        k_n, v_n = rows_of(k, start, group, G, C), rows_of(v, start, group, G, C)
        row = tl.cast(head, tl.int64) * T + start
        for at in range(tl.maximum(-apart, 0), tl.minimum(length, length - apart), BLOCK):
            query = at + place
            key = query + apart
            q_block = load(q_n, at, length, H, C, BLOCK, BLOCK_C)
            k_block = load(k_n, at + apart, length, G, C, BLOCK, BLOCK_C)
            v_block = load(v_n, at + apart, length, G, C, BLOCK, BLOCK_C)
            dy_block = load(dy_n, at, length, H, C, BLOCK, BLOCK_C)
            peak = numbers_of(peaks + row, query, length)
            total = numbers_of(totals + row, query, length)
            mean = numbers_of(means + row, query, length)
            s = product(q_block, k_block, q_n, k_n, at, at + apart, length, H, G, C, PRECISION,
                         PART)  # fmt: skip
            s = scores(s, bias, query[:, None], key[None, :], length, scale, S, CAUSAL)
            dp = product(dy_block, v_block, dy_n, v_n, at, at + apart, length, H, G, C, PRECISION,
                          PART)  # fmt: skip
            p = tl.exp2((s - peak[:, None]) * _LOG2E - total[:, None])
            acc += p * (dp - mean[:, None])
    # Row m holds distances -m to BLOCK - 1 - m: each is moved on by m, to column distance + BLOCK.
    column = tl.arange(0, 2 * BLOCK)[None, :] + place[:, None] - BLOCK
    inside = (column >= 0) & (column < BLOCK)
    moved = tl.gather(acc, tl.where(inside, column, 0), 1)
    by_distance = tl.sum(tl.where(inside, moved, 0.0), 0)
    # Neighbours share BLOCK distances: each has the first half of its own in one row of sums, the
    # second in another.
    place = tl.arange(0, 2 * BLOCK)
    row = (tl.program_id(2) * 2 + place // BLOCK).to(tl.int64) * H + head
    tl.store(sums + row * (2 * BLOCKS * BLOCK) + diagonal * BLOCK + place, by_distance)


def relative_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, offsets: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The op's implementation, see `reference.forward`."""
    T, H, _ = q.shape
    require_countable("tokens of q_THC", T)
    require_countable("numbers of bias_HA", bias.numel())
    y = torch.empty_like(q)
    norms = torch.empty(2, H, T, dtype=torch.float32, device=q.device)
    if T:
        about = (q, k, bias, offsets, causal)
        programs, numbers, constants = _how("attention", ("BLOCK_Q", "BLOCK_K"), *about)
        launch(attention_fwd_kernel, (programs, H), q, k, v, bias, offsets, y, *norms.unbind(),
               scale, *numbers, **constants)  # fmt: skip
    return y, norms


def relative_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, offsets: Tensor, y: Tensor,
    norms: Tensor, causal: bool, scale: float, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, see `reference.backward`."""
    (T, H, _), G, N = q.shape, k.shape[1], len(offsets) - 1
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_bias = norms.new_empty(0)
    if not T:
        return dq, dk, dv, norms.new_zeros(bias.shape) if need_bias else d_bias
    peaks, totals = norms.unbind()
    means = torch.empty_like(peaks)
    given, about = (q, k, v, bias, offsets, dy), (q, k, bias, offsets, causal)
    programs, numbers, constants = _how("attention", ("BLOCK_Q", "BLOCK_K"), *about)
    launch(attention_bwd_dq_kernel, (programs, H), *given, y, peaks, totals, dq, means, scale,
           *numbers, **constants)  # fmt: skip
    programs, numbers, constants = _how("attention_dkv", ("BLOCK_K", "BLOCK_Q"), *about)
    launch(attention_bwd_dkv_kernel, (programs, G), *given, peaks, totals, means, dk, dv, scale,
           *numbers, **constants)  # fmt: skip
    if need_bias:
        _, numbers, constants = _how("attention_dbias", ("BLOCK",), *about)
        _, S, blocks = numbers
        diagonals, shares = (blocks if causal else 2 * blocks - 1), min(N, _SHARES)
        middle = blocks * constants["BLOCK"]
        sums = norms.new_zeros(shares, 2, H, 2 * middle)
        launch(attention_bwd_dbias_kernel, (diagonals, H, shares), *given, peaks, totals, means,
               sums, scale, *numbers, N, **constants)  # fmt: skip
        d_bias = sums[..., middle - S + 1 : middle + S].sum((0, 1))
    return dq, dk, dv, d_bias


def _how(
    op: str, names: tuple[str, ...],
    q: Tensor, k: Tensor, bias: Tensor, offsets: Tensor, causal: bool,
) -> tuple[int, tuple[int, int, int], dict[str, Any]]:  # fmt: skip
    """Of a launch: programs of a head; T, S, the blocks of a segment; constants and options.

    `names` of the tile's sizes: of the block that a program owns, and of those it goes through.
    """
    (T, H, C), S, plan = q.shape, (bias.shape[1] + 1) // 2, plan_of(q)
    tile = plan.tile(op if C <= 64 else "attention_wide")
    if q.dtype is torch.float32 and not plan.interpreted:
        tile = TILES["attention_fp32"][plan.target.name]
    blocks = cdiv(S, tile.block_m)
    constants = {
        "H": H,
        "G": k.shape[1],
        "C": C,
        "CAUSAL": causal,
        "PRECISION": plan.precision,
        "BLOCK_C": max(power_of_two(C), 16),
        "PART": tile.block_k,
        **dict(zip(names, (tile.block_m, tile.block_n), strict=False)),
        **tile.launch_options,
    }
    return (len(offsets) - 1) * blocks, (T, S, blocks), constants
