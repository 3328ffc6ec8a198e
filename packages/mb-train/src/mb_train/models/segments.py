"""Segments: which token attends to which where several samples, or padding, share a sequence.

Tokens attend within the segment they are of. A packed sequence of several documents has one segment
for each, a padded one has its padding in a segment of its own. Segments lie one behind the other,
so a batch says where they end, and the rest follows.

What attention is given of it is one of two. A mask over all pairs serves everywhere, and takes a
bias by distance in; it costs B S^2 and turns the fast kernels away. These compute the pairs within
segments alone, in memory that grows with the tokens, and take all segments of a batch as one row
and the places where they begin: flash attention over sequences of unequal length
(`torch.nn.attention.varlen`, torch 2.11), and, with a number for each distance, mb_kernels'
`relative_attention`. They know no dropout, and here no number above 16 bits. The former serves
layers with a window or sinks also where nothing divides a sequence.

Padding need not be computed. A batch may say which of its places are to be kept: the blocks then
see those alone, as one sequence. To maps, norms and experts a token is a token, and flash attention
wants one row anyhow; under a mask, queries, keys and values go back to where they were in the batch
for the time of the scores.

Letters: B sequences, S tokens of a sequence (Q that attend, S attended to), N segments of a
sequence, T tokens that blocks see (B S, or what is kept of them), H query heads, G key-value heads,
C width of a head, V of its value, A the distances 1 - S to S - 1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mb_kernels import relative_attention
from torch import Tensor

from mb_train.models.config import TransformerConfig
from mb_train.models.relative import by_pairs
from mb_train.models.sinks import flash_takes_sinks, flash_with_sinks

_MAX_HEAD, _MAX_RELATIVE_HEAD = 256, 128


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
    bias_HA: what to add to scores by distance; there is no `kernel` then, nor window or sinks.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    kernel: Callable[..., Any] | None
    bias_HA: Tensor | None = None


class Segments(NamedTuple):
    """Which tokens of a batch are of one segment, and which of them blocks see.

    ends_BN: int64, the place behind each segment of a sequence, ascending to `length`; a segment
        may be empty. With N = 1 nothing divides a sequence.
    length: tokens of a sequence.
    kept_T: int64, ascending, the places that blocks see, sequences laid end to end: all real tokens
        and perhaps some padding. None: all places, as they are.
    """

    ends_BN: Tensor
    length: int
    kept_T: Tensor | None = None

    def numbers(self) -> Tensor:
        """Of the segment that each token is of, [B, S]."""
        places_S = torch.arange(self.length, device=self.ends_BN.device)
        return (places_S >= self.ends_BN[..., None]).sum(1)

    def positions(self) -> Tensor:
        """Each token's place in its segment, [B, S]."""
        starts_BN = F.pad(self.ends_BN[:, :-1], (1, 0))
        places_S = torch.arange(self.length, device=self.ends_BN.device)
        return places_S - starts_BN.gather(1, self.numbers())

    def keep(self, x_BS: Tensor) -> Tensor:
        """What blocks see of numbers of all places: [1, T], or [B, S] as it is."""
        return x_BS if self.kept_T is None else x_BS.flatten()[self.kept_T][None]

    def spread(self, x: Tensor) -> Tensor:
        """[1, T, ...] put where it was, [B, S, ...], with 0 elsewhere; [B, S, ...] as it is."""
        if self.kept_T is None:
            return x
        places = len(self.ends_BN) * self.length
        laid = _Spread.apply(x[0], self.kept_T, places)
        return laid.unflatten(0, (-1, self.length))

    def collect(self, x: Tensor) -> Tensor:
        """The reverse of `spread`."""
        return x if self.kept_T is None else _Collect.apply(x.flatten(0, 1), self.kept_T)[None]

    def edges(self) -> Tensor:
        """Where segments begin in what blocks see, int32 [B N + 1]; the last is the end."""
        rows_B1 = torch.arange(len(self.ends_BN), device=self.ends_BN.device)[:, None] * self.length
        edges = F.pad((self.ends_BN + rows_B1).flatten(), (1, 0))
        if self.kept_T is None:
            return edges.int()
        return torch.searchsorted(self.kept_T, edges, out_int32=True)


class Grid(NamedTuple):
    """What puts the tokens of a kept row back for a mask: those that attend, those attended to."""

    queries: Segments
    keys: Segments


class _Spread(torch.autograd.Function):
    """Rows put at places, 0 elsewhere; each is the other's backward, and none adds anything up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept_T: Tensor, places: int) -> Tensor:
        ctx.save_for_backward(kept_T)
        return x.new_zeros(places, *x.shape[1:]).index_copy(0, kept_T, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (kept_T,) = ctx.saved_tensors
        return grads[0].index_select(0, kept_T), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept_T: Tensor) -> Tensor:
        ctx.save_for_backward(kept_T)
        ctx.places = len(x)
        return x.index_select(0, kept_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept_T,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.places, *grad.shape[1:]).index_copy(0, kept_T, grad), None


def within_segments(
    segments: Segments,
    *,
    causal: bool,
    flash: bool,
    attended: Segments | None = None,
    bias_HA: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    whole: bool = True,
) -> dict[str, Any]:
    """`causal`, `bounds`, `mask`, `grid` of a `BlockContext` whose tokens attend within segments.

    Args:
        segments: of the tokens that attend. Where nothing divides a sequence and all of it is kept
            there is neither mask nor bounds.
        flash: whether `flash_takes` what is to be computed, a bias among it.
        attended: of the tokens attended to, as many in a sequence; None means the same tokens.
        bias_HA: numbers to add to the scores, by distance. In a mask they and what may not be seen
            are one, [B, H, Q, S], for all blocks of a stack.
        dtype: of queries, and so of a mask that has numbers in it.
        whole: torch's attention does where nothing is left out of a sequence. Not in layers with a
            window or sinks.

    Raises:
        ValueError: another number of segments in the sequences attended to.
    """
    other = segments if attended is None else attended
    if other.ends_BN.shape != segments.ends_BN.shape:
        raise ValueError(
            "Expected the ends of as many segments on both sides, got "
            f"{list(segments.ends_BN.shape)} and {list(other.ends_BN.shape)}."
        )
    found: dict[str, Any] = {"causal": causal}
    divided = segments.ends_BN.shape[1] > 1
    left_out = segments.kept_T is not None or other.kept_T is not None
    if flash and (divided or left_out or bias_HA is not None or not whole):
        kernel = None if bias_HA is not None else flash_kernel()
        edges, longest = (segments.edges(), other.edges()), (segments.length, other.length)
        return found | {"bounds": Bounds(*edges, *longest, kernel, bias_HA)}
    if left_out:
        found["grid"] = Grid(segments, other)
    if bias_HA is None and not divided:
        return found
    numbers = [side.numbers() for side in (segments, other)]
    if not divided:  # alike for all sequences
        numbers = [numbers_BS[:1] for numbers_BS in numbers]
    mask = segment_mask(*numbers, causal=causal)
    if bias_HA is None:
        return found | {"mask": mask}
    bias_HQS = by_pairs(bias_HA).to(dtype)
    return found | {"mask": bias_HQS.masked_fill(~mask, -torch.inf)}


def segment_mask(segments_BQ: Tensor, segments_BS: Tensor | None = None, *, causal: bool) -> Tensor:
    """Allowed pairs, bool [B, 1, Q, S]: equal segments and, if `causal`, no later position.

    Args:
        segments_BQ: integer id of each token's segment.
        segments_BS: of the tokens attended to; None means the same tokens.
    """
    other_BS = segments_BQ if segments_BS is None else segments_BS
    mask = segments_BQ[:, None, :, None] == other_BS[:, None, None, :]
    return mask.tril() if causal else mask


def seen(
    config: TransformerConfig, mask: Tensor | None, places_BQ: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """`mask` and `near` of a `BlockContext`: what layers see, all of it or within their window.

    With windows or sinks these are numbers, made once, and not from a mask again in every layer.

    Args:
        mask: allowed pairs, bool [B or 1, 1, Q, S]; None: no token sees a later one, of Q = S.
        places_BQ: of the tokens that attend, among those attended to; [B or 1, Q].
        dtype: of queries.
    """
    if config.plain_attention:
        return {} if mask is None else {"mask": mask}

    def numbers(allowed: Tensor) -> Tensor:
        """What is added to scores; a sink, which is behind the tokens, is seen by all."""
        added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        added.masked_fill_(~allowed, -torch.inf)
        return F.pad(added, (0, 1)) if config.has_sinks else added

    found: dict[str, Any] = {}
    S = places_BQ.shape[1] if mask is None else mask.shape[3]
    behind_BQS = places_BQ[..., None] - torch.arange(S, device=places_BQ.device)
    needs_none = mask is None and not config.has_sinks  # in layers without a window
    mask = (behind_BQS >= 0)[:, None] if mask is None else mask
    if None in config.windows and not needs_none:
        found["mask"] = numbers(mask)
    if config.window is not None and config.window in config.windows:
        found["near"] = numbers(mask & (behind_BQS <= config.window)[:, None])
    return found


def flash_takes(
    config: TransformerConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    training: bool,
    relative: bool = False,
) -> bool:
    """Whether `attend` can compute the attention of such a model, with a bias if `relative`."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if training and config.attention_dropout:
        return False
    if relative:
        return config.head_size <= _MAX_RELATIVE_HEAD
    if config.has_sinks and not flash_takes_sinks():
        return False
    width = max(config.head_size, config.value_size)
    return (
        torch.version.hip is None  # not tried there
        and width <= _MAX_HEAD
        and width % 8 == 0
        and flash_kernel() is not None
    )


def attend(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGV: Tensor,
    bounds: Bounds,
    *,
    causal: bool,
    scale: float | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention within each segment, y_BQHV; scores times `scale`, None meaning 1 / sqrt(C).

    Args:
        window: how many tokens before its own a token sees; None: all.
        sinks_H: see `models.sinks`.
    """
    edges, longest = (bounds.queries, bounds.keys), (bounds.longest_query, bounds.longest_key)
    bias_HA, kernel = bounds.bias_HA, bounds.kernel
    groups, V = q_BQHC.shape[2] // k_BSGC.shape[2], v_BSGV.shape[3]
    q_BQHC, k_BSGC, v_BSGV, scale = equally_wide(q_BQHC, k_BSGC, v_BSGV, scale)
    if groups > 1 and bias_HA is None and sinks_H is None:
        k_BSGC, v_BSGV = (x.repeat_interleave(groups, dim=2) for x in (k_BSGC, v_BSGV))
    tokens = [x.flatten(0, 1).contiguous() for x in (q_BQHC, k_BSGC, v_BSGV)]
    sees = (-1 if window is None else window, 0 if causal else -1)
    if bias_HA is not None:
        assert window is None
        assert sinks_H is None
        y_THC = relative_attention(*tokens, bias_HA, bounds.queries, causal=causal, scale=scale)
    elif sinks_H is not None:
        q, k, v = tokens
        sinks_H = sinks_H.float()
        y_THC = flash_with_sinks(q, k, v, sinks_H, edges, longest, scale=scale, window_size=sees)
    else:
        assert kernel is not None
        y_THC = kernel(*tokens, *edges, *longest, scale=scale, window_size=sees)
    assert isinstance(y_THC, Tensor)
    return y_THC.view_as(q_BQHC)[..., :V]


def equally_wide(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """For kernels that know one width of a head: queries and keys, or values, filled up with 0.

    Scores stay what they were, and so do the first of what attention returns, as many as the values
    had channels.

    Args:
        q, k, v: channels come last.
        scale: of the scores; None meaning 1 / sqrt(C).
    """
    C, V = q.shape[-1], v.shape[-1]
    if V < C:
        return q, k, F.pad(v, (0, C - V)), scale
    if V > C:
        scale = C**-0.5 if scale is None else scale
        return F.pad(q, (0, V - C)), F.pad(k, (0, V - C)), v, scale
    return q, k, v, scale
