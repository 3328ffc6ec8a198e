"""Selective state spaces in chunks: the scan of Mamba-2 (arXiv 2405.21060, section 6).

A head's state s is a matrix [N, P], zero before the first token of a document. Each token lets it
fade, by a rate of the head's and a step of the token's own, writes its number x in the direction of
its b, and reads in that of its c; what it wrote may pass the state by, too:

    s = exp(dt A) s + dt b x        y = c s + D x

Heads of a group share b and c. Token by token that would be a loop over a sequence. In chunks it is
products (state-space duality), for a token reads of another in its chunk

    (c_i b_j) exp(t_i - t_j) dt_j x_j

with t the sum of dt A up to a token (`models.chunks`), and of those before through the state in
front of its chunk. The loop over chunks adds up states, and multiplies nothing but what remains of
them. It is computed in plain PyTorch, in fp32, on any device.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, R heads of a group (H / G),
N width of a state's keys, P of what a head writes, M chunks, L tokens of a chunk.
"""

from __future__ import annotations

import torch
from mb_kernels.uncompiled import uncompiled
from torch import Tensor

from mb_train.models.chunks import chunk_length, computed_in, cut, joined, remains


@uncompiled  # or there would be a graph for each length, whose loop takes minutes to compile
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
    """The scan over sequences, and the state behind their last tokens.

    Heads g R to (g + 1) R - 1 share group g.

    Args:
        x_BSHP: at least one token.
        dt_BSH: at least 0, fp32. A token of 0 leaves the state as it is.
        A_H, D_H: fp32, A at most 0.
        begins_BS: bool, true where a document begins; None: one a sequence.
        state_BHNP: before the first tokens, fp32; None: zero.

    Returns:
        y_BSHP in x's dtype, and the state in fp32.

    Raises:
        ValueError: heads that the groups do not divide.
    """
    B, S, H, P = x_BSHP.shape
    G, N = b_BSGN.shape[2:]
    if H % G:
        raise ValueError(f"Expected the groups to divide the heads, got {G} and {H}.")
    L, numbers = chunk_length(S), computed_in(x_BSHP)

    def by_group(x: Tensor) -> Tensor:
        """[B, G, R, ...] of [B, H, ...]."""
        return x.unflatten(1, (G, -1))

    between, into, onward, through = map(by_group, remains(dt_BSH * A_H, begins_BS, L, numbers))
    x = x_BSHP.to(numbers)
    written = by_group(cut(x * dt_BSH[..., None].to(numbers), L))  # [B, G, R, M, L, P]
    b, c = (cut(x.to(numbers), L)[:, :, None] for x in (b_BSGN, c_BSGN))  # [B, G, 1, M, L, N]
    within = (c @ b.mT * between) @ written
    added = b.mT @ (onward[..., None] * written)
    state = x.new_zeros(B, H, N, P) if state_BHNP is None else state_BHNP.to(numbers)
    state, before = by_group(state), []
    for through_m, added_m in zip(through.unbind(3), added.unbind(3), strict=True):
        before.append(state)
        state = through_m[..., None, None] * state + added_m
    y = within + into[..., None] * (c @ torch.stack(before, dim=3))
    y_BSHP = joined(y.flatten(1, 2), S) + D_H[:, None].to(numbers) * x
    return y_BSHP.to(x_BSHP.dtype), state.flatten(1, 2)
