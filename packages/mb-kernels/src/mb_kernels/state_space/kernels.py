"""Triton kernels of the scan of a selective state space, in chunks.

A program of `states_kernel` goes through the chunks of a head and writes the state in front of each
(or, backwards, the gradient of the state behind it). With these every chunk is computed by itself:
its outputs, and all gradients but two, by a program for each head; those of b and c by one for
several heads of a group, whose shares it adds up in registers.

Sums of decays are in fp64: a head that fades fast has large sums, whose differences matter. In them
the beginning of a document is a decay after which nothing remains.

What is multiplied is bf16, sums are in fp32. For anything else the reference computes, in fp32:
fp16, which states may exceed, and widths or chips with which programs would not fit into registers.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, N width of a state's keys,
P of what a head writes, M chunks of a sequence, L tokens of a chunk.
"""

import triton
import triton.language as tl

from mb_kernels.language.heads import load, rows_of, store

# exp(-1000) is 0 even in fp64, and a chunk of such decays has sums of nine exact digits.
_FORGETTING = tl.constexpr(-1000.0)
# Specialising for them would make no code faster, and they may differ at each step of a run.
_SIZES = ("S", "M", "B")


@triton.jit
def _fading(dt, A, begins, first, S, H: tl.constexpr, BEGINS: tl.constexpr, L: tl.constexpr):
    """(steps [L], sums of decays [L] fp64, their total) of a chunk's tokens, of one head."""
    token = first + tl.arange(0, L)
    steps = tl.load(dt + tl.cast(token, tl.int64) * H, mask=token < S, other=0.0)
    decays = steps.to(tl.float64) * A.to(tl.float64)
    if BEGINS:
        begin = tl.load(begins + token, mask=token < S, other=0)
        decays = tl.where(begin != 0, _FORGETTING, decays)
    return steps, tl.cumsum(decays, 0), tl.sum(decays, 0)


@triton.jit
def _remaining(later, earlier):
    return tl.exp((later - earlier).to(tl.float32))


@triton.jit
def _matrix(at, N: tl.constexpr, P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
            first_n=0, first_p=0):  # fmt: skip
    """Places of a state [N, P] that begins at `at`, and which of them there are."""
    n = first_n + tl.arange(0, BLOCK_N)[:, None]
    p = first_p + tl.arange(0, BLOCK_P)[None, :]
    return at + n * P + p, (n < N) & (p < P)


@triton.jit
def _between(later, earlier, count):
    """What remains of what the earlier token wrote, 0 of pairs that do not count."""
    # Of these the difference may be of any size.
    remaining = _remaining(tl.where(count, later, 0.0), tl.where(count, earlier, 0.0))
    return tl.where(count, remaining, 0.0)


@triton.jit(do_not_specialize=_SIZES)
def states_kernel(
    values, keys, dt, A, begins,  # x and b; with BACKWARD dy and c
    first, states, last,  # [B, H, N, P]; written: [B, H, M, N, P], [B, H, N, P]
    S, M,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BEGINS: tl.constexpr,
    GIVEN: tl.constexpr, BACKWARD: tl.constexpr, L: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """States in front of each chunk, from the first on; BACKWARD their gradients behind each."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, (row % H).to(tl.int32)
    first_p = tl.program_id(1) * BLOCK_P
    values = rows_of(values, batch * S, head, H, P)
    keys = rows_of(keys, batch * S, head // (H // G), G, N)
    dt, begins = dt + batch * S * H + head, begins + batch * S
    rate = tl.load(A + head)
    at, inside = _matrix(row * (N * P), N, P, BLOCK_N, BLOCK_P, 0, first_p)
    acc = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    if GIVEN:
        acc = tl.load(first + at, mask=inside, other=0.0)
    for step in range(M):
        m = M - 1 - step if BACKWARD else step
        here, inside = _matrix((row * M + m) * (N * P), N, P, BLOCK_N, BLOCK_P, 0, first_p)
        tl.store(states + here, acc.to(states.dtype.element_ty), mask=inside)
        steps, sums, total = _fading(dt, rate, begins, m * L, S, H, BEGINS, L)
        # What a token writes, seen from behind the chunk; what it reads, from in front of it.
        share = _remaining(sums, 0.0) if BACKWARD else _remaining(total, sums) * steps
        block = load(values, m * L, S, H, P, L, BLOCK_P, first_p).to(tl.float32) * share[:, None]
        key = load(keys, m * L, S, G, N, L, BLOCK_N)
        acc *= _remaining(total, 0.0)
        acc = tl.dot(tl.trans(key), block.to(key.dtype), acc)
    tl.store(last + at, acc, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def state_space_fwd_kernel(
    x, b, c, dt, A, D, begins, states,
    y,  # written: [B, S, H, P]
    S, M,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BEGINS: tl.constexpr,
    L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) % M
    row = (tl.program_id(0) // M).to(tl.int64)
    batch, head = row // H, (row % H).to(tl.int32)
    group = head // (H // G)
    x, y = rows_of(x, batch * S, head, H, P), rows_of(y, batch * S, head, H, P)
    b, c = rows_of(b, batch * S, group, G, N), rows_of(c, batch * S, group, G, N)
    dt, begins = dt + batch * S * H + head, begins + batch * S
    steps, sums, _ = _fading(dt, tl.load(A + head), begins, m * L, S, H, BEGINS, L)
    b_block = load(b, m * L, S, G, N, L, BLOCK_N)
    c_block = load(c, m * L, S, G, N, L, BLOCK_N)
    at, inside = _matrix((row * M + m) * (N * P), N, P, BLOCK_N, BLOCK_P)
    state = tl.load(states + at, mask=inside, other=0.0)
    acc = tl.dot(c_block, state) * _remaining(sums, 0.0)[:, None]
    pairs = tl.dot(c_block, tl.trans(b_block))
    place = tl.arange(0, L)
    pairs *= _between(sums[:, None], sums[None, :], place[:, None] >= place[None, :])
    x_block = load(x, m * L, S, H, P, L, BLOCK_P)
    pairs = (pairs * steps[None, :]).to(b_block.dtype)
    acc = tl.dot(pairs, x_block, acc)
    store(y, acc + tl.load(D + head) * x_block.to(tl.float32), m * L, S, H, P)


@triton.jit(do_not_specialize=_SIZES)
def state_space_bwd_kernel(
    dy, x, b, c, dt, A, D, begins, states, d_states,
    dx, d_dt, dA, dD,  # written: [B, S, H, P], [B, S, H], [B, M, H] twice
    S, M,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BEGINS: tl.constexpr,
    L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """All gradients but those of b and c; see `reference.backward`."""
    m = tl.program_id(0) % M
    row = (tl.program_id(0) // M).to(tl.int64)
    batch, head = row // H, (row % H).to(tl.int32)
    group = head // (H // G)
    x, dx = rows_of(x, batch * S, head, H, P), rows_of(dx, batch * S, head, H, P)
    dy = rows_of(dy, batch * S, head, H, P)
    b, c = rows_of(b, batch * S, group, G, N), rows_of(c, batch * S, group, G, N)
    begins += batch * S
    rate = tl.load(A + head)
    steps, sums, total = _fading(dt + batch * S * H + head, rate, begins, m * L, S, H, BEGINS, L)
    b_block = load(b, m * L, S, G, N, L, BLOCK_N)
    c_block = load(c, m * L, S, G, N, L, BLOCK_N)
    dy_block = load(dy, m * L, S, H, P, L, BLOCK_P)
    x_block = load(x, m * L, S, H, P, L, BLOCK_P)
    place = tl.arange(0, L)
    pairs = tl.dot(b_block, tl.trans(c_block))  # [writes, reads]
    # What tokens read of what they write themselves no decay changes, so it is kept apart: where
    # states fade fast the rounding of its sums would be all there is of the gradient of decays.
    itself = tl.sum(tl.where(place[:, None] == place[None, :], pairs, 0.0), 1)
    pairs *= _between(sums[None, :], sums[:, None], place[:, None] < place[None, :])
    pairs = pairs.to(b_block.dtype)
    # What tokens read, of which their decays have <dy, y>.
    at, inside = _matrix((row * M + m) * (N * P), N, P, BLOCK_N, BLOCK_P)
    before = tl.load(states + at, mask=inside, other=0.0)
    y = tl.dot(c_block, before) * _remaining(sums, 0.0)[:, None]
    u = (x_block.to(tl.float32) * steps[:, None]).to(b_block.dtype)
    y = tl.dot(tl.trans(pairs), u, y)
    change = tl.sum(dy_block.to(tl.float32) * y, 1)
    # Who reads what they write, behind the chunk and within it.
    behind = tl.load(d_states + at, mask=inside, other=0.0)
    crossing = _remaining(total, 0.0) * tl.sum(before.to(tl.float32) * behind.to(tl.float32))
    du = tl.dot(b_block, behind) * _remaining(total, sums)[:, None]
    crossing += tl.sum(u.to(tl.float32) * du)
    du = tl.dot(pairs, dy_block, du)
    # A token's decay counts for it, for all behind it, and beyond the chunk. What a pair of tokens
    # behind it read and wrote cancels out: so by u as rounded, which y is of, and not by x.
    change -= tl.sum(u.to(tl.float32) * du, 1)
    du += itself[:, None] * dy_block.to(tl.float32)
    d_steps = tl.sum(x_block.to(tl.float32) * du, 1)
    d_decays = tl.cumsum(change, 0, reverse=True) + crossing
    token = m * L + place
    if BEGINS:
        begin = tl.load(begins + token, mask=token < S, other=0)
        d_decays = tl.where(begin != 0, 0.0, d_decays)
    past = tl.load(D + head) * dy_block.to(tl.float32)
    store(dx, du * steps[:, None] + past, m * L, S, H, P)
    tl.store(d_dt + (batch * S + token) * H + head, d_steps + d_decays * rate, mask=token < S)
    of_chunk = (batch * M + m) * H + head
    tl.store(dA + of_chunk, tl.sum(d_decays * steps))
    tl.store(dD + of_chunk, tl.sum(dy_block.to(tl.float32) * x_block.to(tl.float32)))


@triton.jit(do_not_specialize=_SIZES)
def state_space_bwd_keys_kernel(
    dy, x, b, c, dt, A, begins, states, d_states,
    db, dc,  # written: [parts, B, S, G, N] both
    S, M, B,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, BEGINS: tl.constexpr,
    HEADS: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Gradients of b and c, BLOCK_N of their columns, for HEADS heads of a group."""
    parts: tl.constexpr = (H // G + HEADS - 1) // HEADS
    m = tl.program_id(0) % M
    rest = tl.program_id(0) // M
    part, group = rest % parts, rest // parts % G
    batch = (rest // (parts * G)).to(tl.int64)
    first_n = tl.program_id(1) * BLOCK_N
    b, c = rows_of(b, batch * S, group, G, N), rows_of(c, batch * S, group, G, N)
    b_block = load(b, m * L, S, G, N, L, BLOCK_N, first_n)
    c_block = load(c, m * L, S, G, N, L, BLOCK_N, first_n)
    place = tl.arange(0, L)
    written = place[:, None] <= place[None, :]
    db_acc = tl.zeros((L, BLOCK_N), tl.float32)
    dc_acc = tl.zeros((L, BLOCK_N), tl.float32)
    first = group * (H // G) + part * HEADS
    for head in range(first, tl.minimum(first + HEADS, (group + 1) * (H // G))):
        steps, sums, total = _fading(dt + batch * S * H + head, tl.load(A + head),
                                     begins + batch * S, m * L, S, H, BEGINS, L)  # fmt: skip
        u = load(rows_of(x, batch * S, head, H, P), m * L, S, H, P, L, BLOCK_P)
        u = (u.to(tl.float32) * steps[:, None]).to(b_block.dtype)
        dy_block = load(rows_of(dy, batch * S, head, H, P), m * L, S, H, P, L, BLOCK_P)
        pairs = tl.dot(u, tl.trans(dy_block))  # [writes, reads]
        pairs = (pairs * _between(sums[None, :], sums[:, None], written)).to(b_block.dtype)
        at, inside = _matrix(((batch * H + head) * M + m) * (N * P), N, P, BLOCK_N, BLOCK_P,
                             first_n)  # fmt: skip
        behind = tl.load(d_states + at, mask=inside, other=0.0)
        shares = tl.dot(u, tl.trans(behind))
        db_acc += shares * _remaining(total, sums)[:, None]
        db_acc = tl.dot(pairs, c_block, db_acc)
        before = tl.load(states + at, mask=inside, other=0.0)
        shares = tl.dot(dy_block, tl.trans(before))
        dc_acc += shares * _remaining(sums, 0.0)[:, None]
        dc_acc = tl.dot(tl.trans(pairs), b_block, dc_acc)
    at = (part * B + batch) * S
    db, dc = rows_of(db, at, group, G, N), rows_of(dc, at, group, G, N)
    store(db, db_acc, m * L, S, G, N, first_n)
    store(dc, dc_acc, m * L, S, G, N, first_n)
