"""The scan of a selective state space in chunks, in plain PyTorch.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, R heads of a group (H / G),
N width of a state's keys, P of what a head writes, M chunks, L tokens of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mb_kernels.chunks import chunk_length, cut, joined, remains
from mb_kernels.runtime.precision import wide, wide_dtype


def state_space_scan(
    x_BSHP: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    begins_BS: Tensor | None = None,
    *,
    state_BHNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``mb_kernels.state_space_scan``."""
    numbers = (x.to(wide_dtype(x_BSHP)) for x in (dt_BSH, A_H, D_H))
    return forward(x_BSHP, b_BSGN, c_BSGN, *numbers, begins_BS, state_BHNP)


class _Chunks(NamedTuple):
    """What both directions take, by chunk; the last two dimensions are those of matrices.

    b, c: [B, G, 1, M, L, N]. written: [B, G, R, M, L, P], dt x. between: [B, G, R, M, L, L], what
    remains of what the second token wrote, for the first. into, onward: [B, G, R, M, L, 1], of the
    state in front of the chunk, at a token, and of what a token wrote, behind it. through:
    [B, G, R, M, 1, 1], of the state in front, behind. before: [B, G, R, M, N, P], that state.
    """

    b: Tensor
    c: Tensor
    written: Tensor
    between: Tensor
    into: Tensor
    onward: Tensor
    through: Tensor
    before: Tensor
    state: Tensor  # behind the last, [B, H, N, P]


def forward(
    x_BSHP: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    begins_BS: Tensor | None,
    state_BHNP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y_BSHP in x's dtype, and the state behind the last tokens in fp32 (fp64 if x is)."""
    of = _chunks(x_BSHP, b_BSGN, c_BSGN, dt_BSH, A_H, begins_BS, state_BHNP)
    y = (of.c @ of.b.mT * of.between) @ of.written + of.into * (of.c @ of.before)
    y_BSHP = _joined(y, x_BSHP.shape[1]) + D_H[:, None] * wide(x_BSHP)
    return y_BSHP.to(x_BSHP.dtype), of.state


def backward(
    dy_BSHP: Tensor,
    d_state_BHNP: Tensor,
    x_BSHP: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    begins_BS: Tensor | None,
    state_BHNP: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, b, c, dt, A, D and the state in front of the first tokens.

    With s a state and the gradients of what is written (u) and read (y) per token, the logarithm of
    what remains at token j gets

        sum over i >= j in its chunk of <c_i, dc_i> - <u_i, du_i>, and <s, ds> behind the chunk,

    for a product of a pair (i, j') grows by every logarithm behind j' up to i.
    """
    S, G = x_BSHP.shape[1], b_BSGN.shape[2]
    of = _chunks(x_BSHP, b_BSGN, c_BSGN, dt_BSH, A_H, begins_BS, state_BHNP)
    dy, x, dt = (_by_group(cut(wide(t), of.b.shape[4]), G) for t in (dy_BSHP, x_BSHP, dt_BSH))
    d_state = wide(d_state_BHNP).unflatten(1, (G, -1))
    d_behind = []  # the gradient of the state behind each chunk
    added = of.c.mT @ (of.into * dy)
    for through, added_m in zip(of.through.unbind(3)[::-1], added.unbind(3)[::-1], strict=True):
        d_behind.append(d_state)
        d_state = through * d_state + added_m
    behind = torch.stack(d_behind[::-1], dim=3) if d_behind else torch.zeros_like(of.before)
    d_pairs = (dy @ of.written.mT) * of.between
    products = of.c @ of.b.mT
    of_states, into_states = of.onward * (of.b @ behind), of.into * (dy @ of.before.mT)
    du = (products * of.between).mT @ dy + of_states
    dc = d_pairs @ of.b + into_states
    db = d_pairs.mT @ of.c + of.onward * (of.written @ behind.mT)
    # What tokens read of what they write themselves is left out: it cancels out, and where states
    # fade fast its rounding would be all there is.
    read = (d_pairs * products).tril(-1)
    onto = read.sum(-1) - read.sum(-2)  # [B, G, R, M, L]
    onto = onto + (of.c * into_states).sum(-1) - (of.written * of_states).sum(-1)
    crossing = (of.through * of.before * behind).sum((-2, -1))
    crossing = crossing + (of.written * of_states).sum((-2, -1))
    d_decay = onto.flip(-1).cumsum(-1).flip(-1) + crossing[..., None]
    d_decay_BSH = _joined(d_decay[..., None], S)[..., 0]
    if begins_BS is not None:  # where nothing remains, however small the decay
        d_decay_BSH = d_decay_BSH.masked_fill(begins_BS[..., None], 0)
    d_dt_BSH = _joined((x * du).sum(-1, keepdim=True), S)[..., 0] + d_decay_BSH * A_H
    dx_BSHP = _joined(dt[..., None] * du, S) + D_H[:, None] * wide(dy_BSHP)
    db_BSGN, dc_BSGN = (joined(d.sum(2), S) for d in (db, dc))
    return (
        dx_BSHP.to(x_BSHP.dtype), db_BSGN.to(b_BSGN.dtype), dc_BSGN.to(c_BSGN.dtype), d_dt_BSH,
        (d_decay_BSH * dt_BSH).sum((0, 1)), (wide(dy_BSHP) * wide(x_BSHP)).sum((0, 1, 3)),
        d_state.flatten(1, 2),
    )  # fmt: skip


def _chunks(
    x_BSHP: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    begins_BS: Tensor | None,
    state_BHNP: Tensor | None,
) -> _Chunks:
    (B, _, H, P), (G, N), L = x_BSHP.shape, b_BSGN.shape[2:], chunk_length(x_BSHP.shape[1])
    x = wide(x_BSHP)
    fading = remains(dt_BSH * A_H, begins_BS, L, x.dtype)
    between, into, onward, through = (_by_group(t, G) for t in fading)
    written = _by_group(cut(x * dt_BSH[..., None], L), G)
    b, c = (cut(wide(t), L)[:, :, None] for t in (b_BSGN, c_BSGN))
    into, onward, through = into[..., None], onward[..., None], through[..., None, None]
    added = b.mT @ (onward * written)
    # Not the argument itself, which would be returned where there are no tokens.
    state = x.new_zeros(B, H, N, P) if state_BHNP is None else wide(state_BHNP).clone()
    before = []
    for through_m, added_m in zip(through.unbind(3), added.unbind(3), strict=True):
        before.append(state)
        state = through_m.flatten(1, 2) * state + added_m.flatten(1, 2)
    in_front = torch.stack(before, 2).unflatten(1, (G, -1)) if before else torch.zeros_like(added)
    return _Chunks(b, c, written, between, into, onward, through, in_front, state)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, G, R, ...] of [B, H, ...]."""
    return x.unflatten(1, (groups, -1))


def _joined(x: Tensor, tokens: int) -> Tensor:
    """[B, S, H, X] of [B, G, R, M, L, X]."""
    return joined(x.flatten(1, 2), tokens)
