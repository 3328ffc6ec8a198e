"""Segments: which token attends to which where several samples, or padding, share a sequence.

Tokens attend within the segment they are of. A packed sequence of several documents has one segment
for each, a padded one has its padding in a segment of its own. Segments lie one behind the other,
so a batch says where they end, and the rest follows.

What attention is given of it is one of two. A mask over all pairs serves everywhere, and takes a
bias by distance in; it costs B S^2 and turns the fast kernels away. Flash attention over sequences
of unequal length (`torch.nn.attention.varlen`, torch 2.11) computes the pairs within segments
alone, in memory that grows with the tokens: it takes all segments of a batch as one row and the
places where they begin. It knows no dropout, no bias, and no number above 16 bits.

Letters: B sequences, S tokens of a sequence (Q that attend, S attended to), N segments of a
sequence, T = B S tokens, H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mb_train.models.config import TransformerConfig

_MAX_HEAD = 256


@functools.cache
def flash_kernel() -> Callable[..., Any] | None:
    """torch's attention over unequal sequences; None if it has none, or one with other arguments.

    Looked for when it is wanted: it imports torch's compiler, which no other run need wait for.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


class Bounds(NamedTuple):
    """Where the segments of a batch begin, its sequences laid end to end.

    queries, keys: int32 [B N + 1], in the tokens that attend and in those attended to; the last
        is their number, and a segment may be empty.
    longest_query, longest_key: at least the tokens of the longest segment.
    kernel: what `flash_kernel` found: a compiled block takes it as it is, and need not look for it.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    kernel: Callable[..., Any]


def within_segments(
    ends_BN: Tensor,
    length: int,
    *,
    causal: bool,
    flash: bool,
    attended: tuple[Tensor, int] | None = None,
    bias: Tensor | None = None,
) -> dict[str, Any]:
    """`causal` and `bounds` or `mask` of a `BlockContext` whose tokens attend within segments.

    Args:
        ends_BN: the place behind each segment of a sequence, ascending to `length`; a segment may
            be empty. With N = 1 nothing divides a sequence: there is neither mask nor bounds.
        length: tokens of a sequence.
        flash: whether `flash_takes` what is to be computed, a bias among it.
        attended: the ends, as many, and the length of the sequences attended to; None means the
            same sequences.
        bias: numbers to add to the scores, [1, H, Q, S] in the dtype of the queries. They and what
            may not be seen make one mask for all blocks of a stack: [B, H, Q, S] once, not in each.

    Raises:
        ValueError: another number of segments in the sequences attended to.
    """
    other_BN, others = (ends_BN, length) if attended is None else attended
    if other_BN.shape != ends_BN.shape:
        raise ValueError(
            f"Expected the ends of as many segments on both sides, got {list(ends_BN.shape)} and "
            f"{list(other_BN.shape)}."
        )
    found: dict[str, Any] = {"causal": causal}
    divided = ends_BN.shape[1] > 1
    if bias is None and not divided:
        return found
    if flash:
        edges, kernel = (_edges(ends_BN, length), _edges(other_BN, others)), flash_kernel()
        assert kernel is not None
        return found | {"bounds": Bounds(*edges, length, others, kernel)}
    if not divided:  # alike for all sequences
        ends_BN, other_BN = ends_BN[:1], other_BN[:1]
    segments_BQ, segments_BS = segments_of(ends_BN, length), segments_of(other_BN, others)
    mask = segment_mask(segments_BQ, segments_BS, causal=causal)
    return found | {"mask": mask if bias is None else bias.masked_fill(~mask, -torch.inf)}


def segments_of(ends_BN: Tensor, length: int) -> Tensor:
    """Number of the segment that each token is of, [B, length]."""
    places_S = torch.arange(length, device=ends_BN.device)
    return (places_S >= ends_BN[..., None]).sum(1)


def positions_of(ends_BN: Tensor, length: int) -> Tensor:
    """Each token's place in its segment, [B, length]."""
    starts_BN = F.pad(ends_BN[:, :-1], (1, 0))
    places_S = torch.arange(length, device=ends_BN.device)
    return places_S - starts_BN.gather(1, segments_of(ends_BN, length))


def segment_mask(segments_BQ: Tensor, segments_BS: Tensor | None = None, *, causal: bool) -> Tensor:
    """Allowed pairs, bool [B, 1, Q, S]: equal segments and, if `causal`, no later position.

    Args:
        segments_BQ: integer id of each token's segment.
        segments_BS: of the tokens attended to; None means the same tokens.
    """
    other_BS = segments_BQ if segments_BS is None else segments_BS
    mask = segments_BQ[:, None, :, None] == other_BS[:, None, None, :]
    return mask.tril() if causal else mask


def flash_takes(
    config: TransformerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    training: bool,
    bias: Tensor | None = None,
) -> bool:
    """Whether `attend` can compute the attention of such a model."""
    return (
        device.type == "cuda"
        and torch.version.hip is None  # not tried there
        and dtype in (torch.float16, torch.bfloat16)
        and config.head_size <= _MAX_HEAD
        and config.head_size % 8 == 0
        and not (training and config.attention_dropout)
        and bias is None
        and flash_kernel() is not None
    )


def attend(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    bounds: Bounds,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention within each segment, y_BQHC; scores times `scale`, None meaning 1 / sqrt(C)."""
    groups = q_BQHC.shape[2] // k_BSGC.shape[2]
    if groups > 1:
        k_BSGC, v_BSGC = (x.repeat_interleave(groups, dim=2) for x in (k_BSGC, v_BSGC))
    q_THC, k_THC, v_THC = (x.flatten(0, 1).contiguous() for x in (q_BQHC, k_BSGC, v_BSGC))
    window = (-1, 0 if causal else -1)
    *where, kernel = bounds
    y_THC = kernel(q_THC, k_THC, v_THC, *where, scale=scale, window_size=window)
    assert isinstance(y_THC, Tensor)
    return y_THC.view_as(q_BQHC)


def _edges(ends_BN: Tensor, length: int) -> Tensor:
    rows_B1 = torch.arange(len(ends_BN), device=ends_BN.device)[:, None] * length
    return F.pad((ends_BN + rows_B1).flatten(), (1, 0)).int()
