"""Rows of a vocabulary: as many as a tokenizer has tokens, in a multiple that ranks can share.

Letters: V rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from mb_layers.on_demand import Changed, outlines
from torch import Tensor

_TOKENS = "embedding.tokens.weight"
_BY_TOKEN = (_TOKENS, "head.weight", "lm_head.bias", "head_bias")


def rows_of(weights: Mapping[str, Tensor]) -> int:
    """V of a model's weights by our names; both towers of a retriever have as many."""
    return next(len(t) for name, t in outlines(weights).items() if name.endswith(_TOKENS))


def with_rows(weights: Mapping[str, Tensor], rows: int) -> Mapping[str, Tensor]:
    """Weights with at least so many rows: new ones are the mean of those that are there.

    A new token is then as likely as tokens are in the mean, and takes little from the others
    (Hewitt, 2021, "Initializing new word embeddings for pretrained language models").
    """

    def grown(name: str, old: Tensor) -> Tensor:
        if name not in _BY_TOKEN or len(old) >= rows:
            return old
        mean = old.float().mean(0, keepdim=True).to(old.dtype)
        return torch.cat([old, mean.expand(rows - len(old), *old.shape[1:])])

    return Changed(weights, grown)
