"""Attention with a bias by distance in plain PyTorch, a segment at a time.

Letters: T tokens, H query heads, G key-value heads, C width of a head, N segments, L tokens of a
segment, S the longest that there may be, A the distances 1 - S to S - 1.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mb_kernels.runtime.precision import wide


def relative_attention(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    bias_HA: Tensor,
    offsets_N1: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> Tensor:
    """As ``mb_kernels.relative_attention``."""
    scale = max(q_THC.shape[-1], 1) ** -0.5 if scale is None else scale
    y_THC, _ = forward(q_THC, k_TGC, v_TGC, bias_HA, offsets_N1, causal, scale)
    return y_THC


def forward(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    bias_HA: Tensor,
    offsets_N1: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """y_THC, and norms_2HT: each token's highest score, the sum of exp(scores - it) as log2.

    0 and 0 of a token that sees nothing.
    """
    y_parts, norms_parts = [], []
    for rows in _segments(offsets_N1, bias_HA, q_THC.shape[0]):
        q_HLC, k_HLC, v_HLC = _by_head(q_THC.shape[1], q_THC[rows], k_TGC[rows], v_TGC[rows])
        scores_HLL = _scores(q_HLC, k_HLC, bias_HA, causal, scale)
        y_parts.append((_softmax(scores_HLL) @ v_HLC).transpose(0, 1).to(q_THC.dtype))
        norms_parts.append(_norms(scores_HLL))
    return torch.cat(y_parts), torch.cat(norms_parts, dim=2)


def backward(
    dy_THC: Tensor,
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    bias_HA: Tensor,
    offsets_N1: Tensor,
    y_THC: Tensor,
    norms_2HT: Tensor,
    causal: bool,
    scale: float,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and, in fp32 (fp64 if q is), of the bias ([0] without `need_bias`).

    y_THC is for the kernels, see below.
    """
    H, A = bias_HA.shape
    dq, dk, dv = (torch.zeros_like(x) for x in (q_THC, k_TGC, v_TGC))
    d_bias_HA = torch.zeros_like(bias_HA, dtype=norms_2HT.dtype)
    for rows in _segments(offsets_N1, bias_HA, q_THC.shape[0]):
        q_HLC, k_HLC, v_HLC = _by_head(H, q_THC[rows], k_TGC[rows], v_TGC[rows])
        (dy_HLC,) = _by_head(H, dy_THC[rows])
        scores_HLL = _scores(q_HLC, k_HLC, bias_HA, causal, scale)
        p_HLL = _softmax(scores_HLL)
        d_p_HLL = dy_HLC @ v_HLC.mT
        # Kernels take the mean from y, for which they need no product. In 16 bits y is rounded.
        d_scores_HLL = p_HLL * (d_p_HLL - (p_HLL * d_p_HLL).sum(-1, keepdim=True))
        dq[rows] = (d_scores_HLL @ k_HLC * scale).transpose(0, 1).to(dq.dtype)
        for d_x, of_heads_HLC in ((dk, d_scores_HLL.mT @ q_HLC * scale), (dv, p_HLL.mT @ dy_HLC)):
            of_groups_GLC = of_heads_HLC.unflatten(0, (d_x.shape[1], -1)).sum(1)
            d_x[rows] = of_groups_GLC.transpose(0, 1).to(d_x.dtype)
        places_LL = _places(q_HLC.shape[1], A, q_THC.device)
        d_bias_HA.index_add_(1, places_LL.flatten(), d_scores_HLL.flatten(1))
    return dq, dk, dv, d_bias_HA if need_bias else d_bias_HA.new_empty(0)


def check_segments(offsets_N1: Tensor, bias_HA: Tensor, tokens: int) -> list[int]:
    """The offsets, as a list.

    Raises:
        ValueError: they do not divide the tokens, or a segment is longer than the bias reaches.
    """
    bounds, longest = offsets_N1.tolist(), (bias_HA.shape[1] + 1) // 2
    if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] != tokens:
        raise ValueError(
            f"offsets_N1: expected to start at 0, never to fall, and to end at {tokens}, the "
            f"number of tokens; got {bounds}."
        )
    found = max(end - start for start, end in itertools.pairwise(bounds))
    if found > longest:
        raise ValueError(
            f"bias_HA: expected distances {1 - found} to {found - 1}, for segments of {found} "
            f"tokens; got {bias_HA.shape[1]}, enough for {longest}."
        )
    return bounds


def _segments(offsets_N1: Tensor, bias_HA: Tensor, tokens: int) -> Iterator[slice]:
    bounds = check_segments(offsets_N1, bias_HA, tokens)
    return (slice(*ends) for ends in itertools.pairwise(bounds))


def _by_head(heads: int, *tensors: Tensor) -> list[Tensor]:
    """[H, L, C] of each, keys and values once for each query head of a group; fp32 at least."""
    return [wide(x).transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0) for x in tensors]


def _places(length: int, distances: int, device: torch.device) -> Tensor:
    """Which number of the bias a query (row) and a key of a segment have."""
    places_L = torch.arange(length, device=device)
    return places_L - places_L[:, None] + distances // 2


def _scores(q_HLC: Tensor, k_HLC: Tensor, bias_HA: Tensor, causal: bool, scale: float) -> Tensor:
    places_LL = _places(q_HLC.shape[1], bias_HA.shape[1], q_HLC.device)
    scores_HLL = q_HLC @ k_HLC.mT * scale + bias_HA.to(q_HLC.dtype)[:, places_LL]
    if causal:
        later_LL = places_LL > bias_HA.shape[1] // 2
        scores_HLL = scores_HLL.masked_fill(later_LL, -torch.inf)
    return scores_HLL


def _softmax(scores_HLL: Tensor) -> Tensor:
    """Over keys; zeros for a token that sees none."""
    nothing_HL1 = (scores_HLL == -torch.inf).all(-1, keepdim=True)
    return scores_HLL.masked_fill(nothing_HL1, 0.0).softmax(-1).masked_fill(nothing_HL1, 0.0)


def _norms(scores_HLL: Tensor) -> Tensor:
    if not scores_HLL.numel():
        return scores_HLL.new_zeros(2, *scores_HLL.shape[:2])
    peaks_HL = scores_HLL.amax(-1)
    peaks_HL = peaks_HL.masked_fill(peaks_HL == -torch.inf, 0.0)
    totals_HL = (scores_HLL - peaks_HL[..., None]).exp().sum(-1)
    return torch.stack([peaks_HL, totals_HL.masked_fill(totals_HL == 0, 1.0).log2()])
