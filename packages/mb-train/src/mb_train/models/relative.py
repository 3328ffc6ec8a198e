"""Relative positions: a learned number per head and bucket of distances, added to the scores.

T5's (arXiv 1910.10683, section 2.1). Ours is how they begin. With numbers around 0 every token
attends to all alike at first, and what stands beside a word reaches it as one of S: a small model
stays for thousands of steps with what it knows of a word without its neighbours. So heads begin
near, as those of ALiBi (arXiv 2108.12409) do for good: each with a reach of its own, and where
tokens to come are seen, every second head ahead and the others back.

Letters: H heads, Q and S tokens of a sequence, A the distances 1 - S to S - 1, N buckets.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.config import TransformerConfig

NUM_BUCKETS, MAX_DISTANCE = 32, 128  # T5's own
LEAST, OTHER_WAY = -8.0, -3.0  # a score at first: anywhere; less where a head does not look


class RelativeBias(nn.Module):
    """The bias of a sequence with itself.

    Args:
        config: heads and init.
        bidirectional: half of the buckets is for tokens to come; otherwise those are not seen.
    """

    def __init__(self, config: TransformerConfig, *, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(NUM_BUCKETS, config.num_heads)
        nn.init.normal_(self.table.weight, std=config.init_std)
        with torch.no_grad():
            near_NH = near_scores(config.num_heads, bidirectional=bidirectional)
            self.table.weight += near_NH.to(self.table.weight.device)

    def forward(self, length: int) -> Tensor:
        """bias_HA for sequences of `length` tokens, in the table's dtype."""
        distance = torch.arange(1 - length, length, device=self.table.weight.device)
        return self.table(relative_buckets(distance, bidirectional=self.bidirectional)).t()


def by_pairs(bias_HA: Tensor) -> Tensor:
    """bias_HQS, contiguous, whose [h, q, s] is bias_HA[h, s - q + S - 1].

    Rows of 2 S, laid end to end and read in rows of 2 S - 1, are each a step behind the one before.
    A gradient comes back as a sum over rows, where an index for each pair would scatter S^2 of them
    into a few numbers.
    """
    H, A = bias_HA.shape
    S = (A + 1) // 2
    end_to_end = F.pad(bias_HA, (0, 1))[:, None].expand(H, S, A + 1).reshape(H, S * (A + 1))
    return end_to_end[:, : S * A].view(H, S, A)[..., S - 1 :].contiguous()


def near_scores(heads: int, *, bidirectional: bool) -> Tensor:
    """What heads begin with, [N, H]: less by a head's slope for each token of distance.

    The slopes fall from 1 to 2^-8, for pairs of heads where there are two ways to look.
    """
    distance_S = torch.arange(-MAX_DISTANCE, MAX_DISTANCE + 1, device="cpu")
    head_H = torch.arange(heads, device="cpu")
    pair_H, pairs = (head_H // 2, (heads + 1) // 2) if bidirectional else (head_H, heads)
    scores_SH = -(2.0 ** (-8 * pair_H / pairs)) * distance_S.abs()[:, None]
    if bidirectional:
        looks_on_SH = distance_S.sign()[:, None] == head_H % 2 * 2 - 1
        scores_SH = torch.where(looks_on_SH, scores_SH, scores_SH + OTHER_WAY)
    buckets_S = relative_buckets(distance_S, bidirectional=bidirectional)
    scores_NH = torch.full((NUM_BUCKETS, heads), LEAST, device="cpu")
    # A bucket of several distances has the score of the nearest.
    return scores_NH.scatter_reduce(0, buckets_S[:, None].expand(-1, heads), scores_SH, "amax")


def relative_buckets(distance: Tensor, *, bidirectional: bool) -> Tensor:
    """T5's buckets: one per distance when near, growing with its logarithm up to MAX_DISTANCE.

    Args:
        distance: place of the key less that of the query, integers of any shape.
        bidirectional: the second half of the buckets is for keys that come later.
    """
    buckets, offset = NUM_BUCKETS, torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        far = distance.abs()
    else:
        far = (-distance).clamp(min=0)
    exact = buckets // 2
    steps = torch.log(far.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact)
    coarse = (exact + (steps * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(far < exact, far, coarse)
