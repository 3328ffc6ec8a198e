"""Sequences in chunks, between which a state goes on: what fades within a chunk and across.

A head lets its state fade by exp(decay) at each token. With t the sum of a chunk's decays up to and
with a token, what token j has written is exp(t_i - t_j) of it when token i reads it: only sums of
decays are in exponents, so none is above 0.

Letters: B sequences, S tokens of a sequence, H heads, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a chunk, as in the kernels of the delta rule's paper.
CHUNK = 64
_SIZES = (1, 2, 4, 8, 16, 32, CHUNK)


class Remains(NamedTuple):
    """What remains of what was there, in [0, 1]; 0 across the beginning of a document.

    between_BHNLL: of what the second token wrote, for the first to read; 0 for those before.
    into_BHNL: of the state in front of the chunk, for a token to read.
    onward_BHNL: of what a token wrote, behind the chunk.
    through_BHN: of the state in front of the chunk, behind it.
    """

    between_BHNLL: Tensor
    into_BHNL: Tensor
    onward_BHNL: Tensor
    through_BHN: Tensor


def chunk_length(tokens: int) -> int:
    """L, a power of two: a few tokens are no whole chunk."""
    return next(size for size in _SIZES if size >= min(tokens, CHUNK))


def cut(x_BSH: Tensor, length: int) -> Tensor:
    """[B, H, N, L, ...] of [B, S, H, ...], filled up behind with zeros."""
    filled = F.pad(x_BSH, (0, 0) * (x_BSH.ndim - 2) + (0, -x_BSH.shape[1] % length))
    return filled.unflatten(1, (-1, length)).movedim(3, 1)


def joined(y_BHNLX: Tensor, tokens: int) -> Tensor:
    """The inverse of `cut`, [B, S, H, X], without what was filled up."""
    return y_BHNLX.movedim(1, 3).flatten(1, 2)[:, :tokens].contiguous()


def remains(
    decay_BSH: Tensor, begins_BS: Tensor | None, length: int, dtype: torch.dtype
) -> Remains:
    """What remains of states, in `dtype`, by the logarithm of it at each token, at most 0."""
    # Of a head that fades fast these are large, and their differences, which matter, small.
    total = cut(decay_BSH, length).double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).to(dtype)
    onward = (total[..., -1:] - total).to(dtype)
    into, through = total.to(dtype), total[..., -1].to(dtype)
    apart = torch.ones(length, length, dtype=torch.bool, device=decay_BSH.device).triu(1)
    if begins_BS is not None:
        # How many documents have begun in a token's chunk; of none it is the one from before.
        begun = cut(begins_BS[..., None], length).cumsum(-1)
        apart = apart | (begun[..., :, None] != begun[..., None, :])
        into, through = (x.masked_fill(n > 0, -torch.inf) for x, n in
                         ((into, begun), (through, begun[..., -1])))  # fmt: skip
        onward = onward.masked_fill(begun != begun[..., -1:], -torch.inf)
    between = between.masked_fill(apart, -torch.inf)
    return Remains(*(x.exp() for x in (between, into, onward, through)))
