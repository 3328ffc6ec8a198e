"""Attention within the documents of packed samples, without a mask over all pairs.

A sample of several documents needs the pairs within each of them alone. Flash attention over
sequences of unequal length (`torch.nn.attention.varlen`, torch 2.11) computes just those, in memory
that grows with the tokens, where a mask costs B S^2 and turns the fast kernel away. It takes the
documents of all samples as one row of sequences and the places where they begin.

It knows no dropout and no number above 16 bits. Where it is not, `attention.segment_mask` says the
same.

Letters: B sequences, S tokens of a sequence, N documents of a sequence at most, T = B S tokens, H
query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch was built without it
    varlen_attn = None

_PARAMETERS = () if varlen_attn is None else inspect.signature(varlen_attn).parameters
_MAX_HEAD = 256


class Documents(NamedTuple):
    """Where the documents of a batch lie in its tokens, laid end to end.

    edges: int32 [B N + 1], where each begins, and at last T; a document may be empty.
    longest: at least the tokens of the longest.
    """

    edges: Tensor
    longest: int


def usable(x: Tensor, dtype: torch.dtype, head_size: int, dropout: float) -> bool:
    """Whether `attend` computes such attention where `x` lies."""
    return (
        "window_size" in _PARAMETERS
        and x.is_cuda
        and torch.version.hip is None  # not tried there
        and dtype in (torch.float16, torch.bfloat16)
        and head_size <= _MAX_HEAD
        and head_size % 8 == 0
        and dropout == 0
    )


def documents_of(starts_BN: Tensor, length: int) -> Documents:
    """Documents from the place of each one's first token in its sample.

    Args:
        starts_BN: integers, not falling; a sample with fewer than N is filled up with `length`.
        length: S.
    """
    B = starts_BN.shape[0]
    rows_B = torch.arange(B, device=starts_BN.device)[:, None] * length
    end = torch.full((1,), B * length, device=starts_BN.device, dtype=torch.int32)
    return Documents(torch.cat([(starts_BN + rows_B).flatten().int(), end]), length)


def attend(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """Causal attention within each document, y_BSHC.

    Args:
        scale: scores are multiplied by it; None means 1 / sqrt(C).
    """
    assert varlen_attn is not None
    groups = q_BSHC.shape[2] // k_BSGC.shape[2]
    if groups > 1:
        k_BSGC, v_BSGC = (x.repeat_interleave(groups, dim=2) for x in (k_BSGC, v_BSGC))
    q_THC, k_THC, v_THC = (x.flatten(0, 1).contiguous() for x in (q_BSHC, k_BSGC, v_BSGC))
    y_THC = varlen_attn(
        q_THC, k_THC, v_THC, documents.edges, documents.edges,
        documents.longest, documents.longest, scale=scale, window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(y_THC, Tensor)
    return y_THC.view_as(q_BSHC)
