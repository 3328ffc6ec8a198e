"""Triton kernels of attention with a bias by distance: FlashAttention-2 (arXiv 2307.08691).

A program owns a block of queries, or of keys, of one segment and head. For each tile it reads the
bias at the tile's distances, and -inf for keys that a query may not see.

The gradient of the bias sums the scores' gradients along diagonals, over all segments. It has its
own kernel, because in the others a program meets another diagonal at each step. A program of this
kernel computes all tiles on one diagonal of blocks again. They have the same distances, so their
sum stays in registers, and is summed by distance once, at the end.

Grids are large enough for the longest possible segment, because the host does not know the lengths.
Programs beyond the end of a segment end at once.

Letters: T tokens, H query heads, G key-value heads, C width of a head, N segments, S the longest
segment there may be, A = 2 S - 1 distances. Scores in kernels are in units of log(2), for exp2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets.table import TILES

_LOG2E = tl.constexpr(1.4426950408889634)
# Programs that share the segments of a diagonal; with more, more sums are added up afterwards.
_SHARES = 8

# Specialising for them would make no code faster, and they may differ at each step of a run.
_SIZES = ("T", "S", "BLOCKS", "N")


@triton.jit
def _load(x, start, first, head, length, HEADS: tl.constexpr, C: tl.constexpr,
          BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, first_c=0):  # fmt: skip
    """[BLOCK, BLOCK_C] of x [T, HEADS, C] from (first, first_c) of a segment on, 0 outside it."""
    row = tl.arange(0, BLOCK)[:, None]
    c = first_c + tl.arange(0, BLOCK_C)[None, :]
    inside = (first + row < length) & (c < C)
    base = x + ((start + first).to(tl.int64) * HEADS + head) * C
    return tl.load(base + row * (HEADS * C) + c, mask=inside, other=0.0)


@triton.jit
def _store(x, block, start, first, head, length, HEADS: tl.constexpr, C: tl.constexpr,
           BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Write block where `_load` reads."""
    row = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    inside = (first + row < length) & (c < C)
    base = x + ((start + first).to(tl.int64) * HEADS + head) * C
    tl.store(base + row * (HEADS * C) + c, block.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    x_block, y_block, x, y, start, first_x, first_y, head_x, head_y, length,
    HEADS_X: tl.constexpr, HEADS_Y: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """[BLOCK_X, BLOCK_Y] of x y^T.

    Of heads wider than PART both are read anew, PART columns at a time, so that registers hold no
    more of them. A block that nothing else uses is then never read, for the compiler drops it.
    """
    BLOCK_X: tl.constexpr = x_block.shape[0]
    BLOCK_Y: tl.constexpr = y_block.shape[0]
    if x_block.shape[1] <= PART:
        acc = tl.dot(x_block, tl.trans(y_block), input_precision=PRECISION)
    else:
        acc = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
        for c in range(0, C, PART):
            x_part = _load(x, start, first_x, head_x, length, HEADS_X, C, BLOCK_X, PART, c)
            y_part = _load(y, start, first_y, head_y, length, HEADS_Y, C, BLOCK_Y, PART, c)
            acc = tl.dot(x_part, tl.trans(y_part), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _scores(product, bias, query, key, length, scale, S, CAUSAL: tl.constexpr):
    """Scores of the places `query` and `key` of a segment, -inf where one is not to be seen."""
    seen = (query < length) & (key < length)
    if CAUSAL:
        seen &= key <= query
    by_distance = tl.load(bias + (S - 1 + key - query), mask=seen, other=float("-inf"))
    return product * (scale * _LOG2E) + by_distance.to(tl.float32) * _LOG2E


@triton.jit
def _segment(offsets, BLOCKS, BLOCK: tl.constexpr):
    """(start, length, first place) of this program's block of a segment."""
    start = tl.load(offsets + tl.program_id(0) // BLOCKS)
    end = tl.load(offsets + tl.program_id(0) // BLOCKS + 1)
    return start, (end - start).to(tl.int32), tl.program_id(0) % BLOCKS * BLOCK


@triton.jit(do_not_specialize=_SIZES)
def attention_fwd_kernel(
    q, k, v, bias, offsets,  # [T, H, C], [T, G, C] twice, [H, A], [N + 1]
    y, lse,  # written: [T, H, C]; [H, T] fp32
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = _segment(offsets, BLOCKS, BLOCK_Q)
    if first >= length:
        return
    head = tl.program_id(1)
    group = head // (H // G)
    bias += head * (2 * S - 1)
    query = first + tl.arange(0, BLOCK_Q)
    q_block = _load(q, start, first, head, length, H, C, BLOCK_Q, BLOCK_C)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    end = tl.minimum(length, first + BLOCK_Q) if CAUSAL else length
    for at in range(0, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        k_block = _load(k, start, at, group, length, G, C, BLOCK_K, BLOCK_C)
        v_block = _load(v, start, at, group, length, G, C, BLOCK_K, BLOCK_C)
        s = _product(q_block, k_block, q, k, start, first, at, head, group, length, H, G, C,
                     PRECISION, PART)  # fmt: skip
        s = _scores(s, bias, query[:, None], key[None, :], length, scale, S, CAUSAL)
        peak_now = tl.maximum(peak, tl.max(s, 1))
        # Of a query that has seen nothing yet the peak is -inf, and so are its scores.
        base = tl.where(peak_now == float("-inf"), 0.0, peak_now)
        shrink = tl.exp2(peak - base)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * shrink[:, None], input_precision=PRECISION)
        peak = peak_now
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    _store(y, acc / total[:, None], start, first, head, length, H, C, BLOCK_Q, BLOCK_C)
    found = tl.where(seen, (peak + tl.log2(total)) / _LOG2E, 0.0)
    tl.store(lse + tl.cast(head, tl.int64) * T + start + query, found, mask=query < length)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dq_kernel(
    q, k, v, bias, offsets, dy, y, lse,
    dq, means,  # written: [T, H, C]; [H, T] fp32, sum(dy y), which the others read
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = _segment(offsets, BLOCKS, BLOCK_Q)
    if first >= length:
        return
    head = tl.program_id(1)
    group = head // (H // G)
    bias += head * (2 * S - 1)
    query = first + tl.arange(0, BLOCK_Q)
    row = tl.cast(head, tl.int64) * T + start + query
    dy_block = _load(dy, start, first, head, length, H, C, BLOCK_Q, BLOCK_C)
    y_block = _load(y, start, first, head, length, H, C, BLOCK_Q, BLOCK_C)
    mean = tl.sum(dy_block.to(tl.float32) * y_block.to(tl.float32), 1)
    tl.store(means + row, mean, mask=query < length)
    q_block = _load(q, start, first, head, length, H, C, BLOCK_Q, BLOCK_C)
    log_total = tl.load(lse + row, mask=query < length, other=0.0) * _LOG2E
    acc = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    end = tl.minimum(length, first + BLOCK_Q) if CAUSAL else length
    for at in range(0, end, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        k_block = _load(k, start, at, group, length, G, C, BLOCK_K, BLOCK_C)
        v_block = _load(v, start, at, group, length, G, C, BLOCK_K, BLOCK_C)
        s = _product(q_block, k_block, q, k, start, first, at, head, group, length, H, G, C,
                     PRECISION, PART)  # fmt: skip
        s = _scores(s, bias, query[:, None], key[None, :], length, scale, S, CAUSAL)
        dp = _product(dy_block, v_block, dy, v, start, first, at, head, group, length, H, G, C,
                      PRECISION, PART)  # fmt: skip
        ds = tl.exp2(s - log_total[:, None]) * (dp - mean[:, None])
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision=PRECISION)
    _store(dq, acc * scale, start, first, head, length, H, C, BLOCK_Q, BLOCK_C)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dkv_kernel(
    q, k, v, bias, offsets, dy, lse, means,
    dk, dv,  # written: [T, G, C] both
    scale, T, S, BLOCKS,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    start, length, first = _segment(offsets, BLOCKS, BLOCK_K)
    if first >= length:
        return
    group = tl.program_id(1)
    key = first + tl.arange(0, BLOCK_K)
    k_block = _load(k, start, first, group, length, G, C, BLOCK_K, BLOCK_C)
    v_block = _load(v, start, first, group, length, G, C, BLOCK_K, BLOCK_C)
    dk_acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    dv_acc = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    begin = first // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    for head in range(group * (H // G), (group + 1) * (H // G)):
        for at in range(begin, length, BLOCK_Q):
            query = at + tl.arange(0, BLOCK_Q)
            row = tl.cast(head, tl.int64) * T + start + query
            q_block = _load(q, start, at, head, length, H, C, BLOCK_Q, BLOCK_C)
            dy_block = _load(dy, start, at, head, length, H, C, BLOCK_Q, BLOCK_C)
            log_total = tl.load(lse + row, mask=query < length, other=0.0) * _LOG2E
            mean = tl.load(means + row, mask=query < length, other=0.0)
            # Keys are rows here, so that what multiplies queries need not be turned.
            s = _product(k_block, q_block, k, q, start, first, at, group, head, length, G, H, C,
                         PRECISION, PART)  # fmt: skip
            of_head = bias + head * (2 * S - 1)
            s = _scores(s, of_head, query[None, :], key[:, None], length, scale, S, CAUSAL)
            p = tl.exp2(s - log_total[None, :])
            dv_acc = tl.dot(p.to(dy_block.dtype), dy_block, dv_acc, input_precision=PRECISION)
            dp = _product(v_block, dy_block, v, dy, start, first, at, group, head, length, G, H, C,
                          PRECISION, PART)  # fmt: skip
            ds = p * (dp - mean[None, :])
            dk_acc = tl.dot(ds.to(q_block.dtype), q_block, dk_acc, input_precision=PRECISION)
    _store(dk, dk_acc * scale, start, first, group, length, G, C, BLOCK_K, BLOCK_C)
    _store(dv, dv_acc, start, first, group, length, G, C, BLOCK_K, BLOCK_C)


@triton.jit(do_not_specialize=_SIZES)
def attention_bwd_dbias_kernel(
    q, k, v, bias, offsets, dy, lse, means,
    sums,  # written: [shares, 2, H, 2 BLOCKS BLOCK] fp32, by distance from -BLOCKS BLOCK on
    scale, T, S, BLOCKS, N,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    group = head // (H // G)
    of_head = bias + head * (2 * S - 1)
    diagonal = tl.program_id(0)
    apart = (diagonal - BLOCKS + 1) * BLOCK  # from the first query to the first key of a tile
    place = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for segment in range(tl.program_id(2), N, tl.num_programs(2)):
        start = tl.load(offsets + segment)
        length = (tl.load(offsets + segment + 1) - start).to(tl.int32)
        for at in range(tl.maximum(-apart, 0), tl.minimum(length, length - apart), BLOCK):
            query = at + place
            key = query + apart
            row = tl.cast(head, tl.int64) * T + start + query
            q_block = _load(q, start, at, head, length, H, C, BLOCK, BLOCK_C)
            k_block = _load(k, start, at + apart, group, length, G, C, BLOCK, BLOCK_C)
            v_block = _load(v, start, at + apart, group, length, G, C, BLOCK, BLOCK_C)
            dy_block = _load(dy, start, at, head, length, H, C, BLOCK, BLOCK_C)
            log_total = tl.load(lse + row, mask=query < length, other=0.0) * _LOG2E
            mean = tl.load(means + row, mask=query < length, other=0.0)
            s = _product(q_block, k_block, q, k, start, at, at + apart, head, group, length, H, G,
                         C, PRECISION, PART)  # fmt: skip
            s = _scores(s, of_head, query[:, None], key[None, :], length, scale, S, CAUSAL)
            dp = _product(dy_block, v_block, dy, v, start, at, at + apart, head, group, length, H,
                          G, C, PRECISION, PART)  # fmt: skip
            acc += tl.exp2(s - log_total[:, None]) * (dp - mean[:, None])
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
    """The op's implementation, see `op`."""
    T, H, _ = q.shape
    require_countable("tokens of q_THC", T)
    require_countable("numbers of bias_HA", bias.numel())
    y = torch.empty_like(q)
    lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
    if T:
        about = (q, k, bias, offsets, causal)
        programs, numbers, constants = _how("attention", ("BLOCK_Q", "BLOCK_K"), *about)
        launch(attention_fwd_kernel, (programs, H), q, k, v, bias, offsets, y, lse, scale, *numbers,
               **constants)  # fmt: skip
    return y, lse


def relative_attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, offsets: Tensor, y: Tensor,
    lse: Tensor, causal: bool, scale: float, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, see `reference.backward`."""
    (T, H, _), G, N = q.shape, k.shape[1], len(offsets) - 1
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    d_bias = lse.new_empty(0)
    if not T:
        return dq, dk, dv, lse.new_zeros(bias.shape) if need_bias else d_bias
    means = torch.empty_like(lse)
    given, about = (q, k, v, bias, offsets, dy), (q, k, bias, offsets, causal)
    programs, numbers, constants = _how("attention", ("BLOCK_Q", "BLOCK_K"), *about)
    launch(attention_bwd_dq_kernel, (programs, H), *given, y, lse, dq, means, scale, *numbers,
           **constants)  # fmt: skip
    programs, numbers, constants = _how("attention_dkv", ("BLOCK_K", "BLOCK_Q"), *about)
    launch(attention_bwd_dkv_kernel, (programs, G), *given, lse, means, dk, dv, scale, *numbers,
           **constants)  # fmt: skip
    if need_bias:
        _, numbers, constants = _how("attention_dbias", ("BLOCK",), *about)
        _, S, blocks = numbers
        diagonals, shares = (blocks if causal else 2 * blocks - 1), min(N, _SHARES)
        middle = blocks * constants["BLOCK"]
        sums = lse.new_zeros(shares, 2, H, 2 * middle)
        launch(attention_bwd_dbias_kernel, (diagonals, H, shares), *given, lse, means, sums, scale,
               *numbers, N, **constants)  # fmt: skip
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
