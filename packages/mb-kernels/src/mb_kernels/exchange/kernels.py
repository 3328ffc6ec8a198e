"""Kernels of ``mb_kernels.exchange``: rows into the memory of other ranks, and the wait for theirs.

Nothing here needs instructions that Triton does not have, so the same kernels compile for NVIDIA
and AMD: addresses of other ranks' memory come from a table of 64-bit integers, data moves by plain
loads and stores, and signals are atomics of scope "sys".

Order of memory: every program of ``push_kernel`` stores its rows, meets its own threads at a
barrier and releases a ticket; the program that draws the last ticket has thereby acquired all the
others' stores, and releases a signal to each peer. ``wait_kernel`` acquires the signals; what reads
the rows is a later kernel of the same stream.

Letters: T tokens, C destinations of a token, P ranks, M the most tokens a rank may bring, D hidden,
W words of payload, R = P M rows of a buffer.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.language.memory import load_picked, store_picked
from mb_kernels.runtime.launch import cdiv, launch, power_of_two


@triton.jit
def push_kernel(
    x_ptr,  # [T, D] with order_ptr, else [R, D]; or None: other kernels have stored the rows
    payload_ptr,  # fp32 [T, W] or [R, W]; or None
    order_ptr,  # int32 [T C]: slots by destination; or None
    counts_ptr,  # int32 [P]: rows for each peer
    table_ptr,  # int64 [P]: where each peer's arena starts
    done_ptr,  # int32 [1], zero between launches
    rows_at,  # where in an arena the rows go, in bytes
    payload_at,
    counts_at,  # with SEND_COUNTS
    signals_at,
    rank,
    M,
    D,
    W,
    C: tl.constexpr,
    P: tl.constexpr,
    PEERS: tl.constexpr,  # a power of two from P on
    SEND_COUNTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    programs = tl.num_programs(0)
    peer_P = tl.arange(0, PEERS)
    count_P = tl.load(counts_ptr + peer_P, mask=peer_P < P, other=0)
    # Blocks of rows go to the peers in turn (this rank is one of them), and so do those of each
    # program. With one destination after the other, links would idle while a rank copies its own.
    turns = tl.cdiv(tl.max(count_P, 0), BLOCK_R) * P
    if x_ptr is None and payload_ptr is None:
        turns = 0
    for turn in range(tl.program_id(0), turns, programs):
        block = turn // P
        peer = (turn + block * P // programs + rank) % P
        i = block * BLOCK_R + tl.arange(0, BLOCK_R)
        live = i < tl.sum(tl.where(peer_P == peer, count_P, 0), 0)
        r = i + tl.sum(tl.where(peer_P < peer, count_P, 0), 0)
        source = peer * M + i
        if order_ptr is not None:
            source = tl.load(order_ptr + r, mask=live, other=0) // C
        arena = tl.load(table_ptr + peer)
        if x_ptr is not None:
            to = (arena + rows_at).to(tl.pointer_type(x_ptr.dtype.element_ty))
            to = tl.multiple_of(to + (rank * M + i).to(tl.int64) * D, 16)
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                x = load_picked(x_ptr, source, live, d, D)
                tl.store(to[:, None] + d[None, :], x, mask=live[:, None] & (d < D)[None, :])
        if payload_ptr is not None:
            w = tl.arange(0, BLOCK_W)
            mask = live[:, None] & (w < W)[None, :]
            words = load_picked(payload_ptr, source, live, w, W)
            words_to = (arena + payload_at).to(tl.pointer_type(tl.float32))
            words_to += (rank * M + i).to(tl.int64) * W
            tl.store(words_to[:, None] + w[None, :], words, mask)

    tl.debug_barrier()
    ticket = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys")
    if ticket == tl.num_programs(0) - 1:
        tl.store(done_ptr, 0)
        if SEND_COUNTS:
            for p in range(P):
                arena = tl.load(table_ptr + p)
                counts_to = (arena + counts_at).to(tl.pointer_type(tl.int32)) + rank
                tl.store(counts_to, tl.load(counts_ptr + p))
        tl.debug_barrier()
        for p in range(P):
            arena = tl.load(table_ptr + p)
            signal = (arena + signals_at).to(tl.pointer_type(tl.int32)) + rank
            tl.atomic_add(signal, 1, sem="release", scope="sys")


@triton.jit
def wait_kernel(
    table_ptr,  # int64 [P]
    counts_ptr,  # int32 [P]: copy of what the peers sent; with COUNTS
    error,  # address of int32 [3]: set to (1, place, peer) when a peer does not come
    counts_at,
    signals_at,
    rank,
    place,
    polls,  # looks at a signal before giving up
    P: tl.constexpr,
    COUNTS: tl.constexpr,
):
    # An address that fits in 32 bits comes as an int32, which the interpreter makes no pointer of.
    error_ptr = error.to(tl.int64).to(tl.pointer_type(tl.int32))
    failed = tl.load(error_ptr)
    # After one failure no peer is waited for any more: the host will read the error soon.
    limit = tl.where(failed == 0, polls, 0)
    arena = tl.load(table_ptr + rank)
    signals = (arena + signals_at).to(tl.pointer_type(tl.int32))
    for p in range(P):
        came = tl.atomic_add(signals + p, 0, sem="acquire", scope="sys")
        looks = 0
        while (came < 1) & (looks < limit):
            came = tl.atomic_add(signals + p, 0, sem="acquire", scope="sys")
            looks += 1
        if came < 1:
            if failed == 0:
                tl.store(error_ptr + 1, place)
                tl.store(error_ptr + 2, p)
                tl.store(error_ptr, 1)
                failed += 1
        else:
            tl.atomic_add(signals + p, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()
    if COUNTS:
        counts = (arena + counts_at).to(tl.pointer_type(tl.int32))
        for p in range(P):
            tl.store(counts_ptr + p, tl.load(counts + p))


@triton.jit
def sum_home_kernel(
    rows_ptr,  # [R, D]: row p M + i is the i-th that came from rank p
    peers_ptr,  # int32 [T, C]: destinations of each token, -1 for none
    inverse_ptr,  # int32 [T C]: a slot's row among all that were sent, by destination
    offsets_ptr,  # int32 [P + 1]: where a destination's rows begin
    y_ptr,  # [T, D]
    tokens,
    M,
    D,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = t < tokens
    slot = t.to(tl.int64) * C
    WIDE: tl.constexpr = (  # ty: ignore[invalid-assignment]
        tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    )
    acc = tl.zeros((BLOCK_T, BLOCK_D), WIDE)
    for c in range(C):
        peer = tl.load(peers_ptr + slot + c, mask=live, other=-1)
        there = peer >= 0
        r = tl.load(inverse_ptr + slot + c, mask=there, other=0)
        row = peer * M + r - tl.load(offsets_ptr + peer, mask=there, other=0)
        acc += load_picked(rows_ptr, row, there, d, D).to(WIDE)
    store_picked(y_ptr, acc, t, live, d, D)


def push(
    programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[int, ...], **kind: Any
) -> None:
    """``push_kernel`` of payload words W and rows of D numbers, the last two of ``numbers``."""
    *_, hidden, words = numbers
    block_d, block_w = min(power_of_two(hidden), 1024), power_of_two(words)
    launch(
        push_kernel,
        (programs,),
        *tensors,
        *numbers,
        **kind,
        PEERS=power_of_two(kind["P"]),
        BLOCK_R=max(256 // block_w if tensors[0] is None else 4096 // block_d, 1),
        BLOCK_D=block_d,
        BLOCK_W=block_w,
    )


def wait(table: Tensor, counts: Tensor, numbers: tuple[int, ...], *, send_counts: bool) -> None:
    """``wait_kernel``, one program of one warp."""
    constants = {"P": counts.numel(), "COUNTS": send_counts}
    launch(wait_kernel, (1,), table, counts, *numbers, **constants, num_warps=1)


def sum_home(
    rows: Tensor, peers: Tensor, inverse: Tensor, offsets: Tensor, most_tokens: int
) -> Tensor:
    """``sum_home_kernel``: [T, columns of rows]."""
    (tokens, columns), width = peers.shape, rows.shape[1]
    y = rows.new_empty((tokens, width))
    if y.numel() == 0:
        return y
    block_d = min(power_of_two(width), 1024)
    block_t = max(1024 // block_d, 1)  # as in ``combine``, see permute.kernels
    launch(
        sum_home_kernel,
        (cdiv(tokens, block_t), cdiv(width, block_d)),
        *(rows, peers, inverse, offsets, y),
        *(tokens, most_tokens, width),
        C=columns,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
    )
    return y
