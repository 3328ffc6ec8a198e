"""The head of a language model: a row for each token, its own or the embedding's (a tied head).

Letters: D hidden, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding
from mb_train.models.linear import Linear


def own_head(config: TransformerConfig) -> Linear | None:
    """A head with weights of its own; None if it is tied to the embedding."""
    if config.tie_embeddings:
        return None
    return Linear(config.hidden_size, config.vocab_size, std=config.ends_std, bias=False)


def bias_of_scores(config: TransformerConfig) -> nn.Parameter | None:
    """A number for each token that is added to its score, zero at first; None without."""
    return nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None


def head_weight(head: Linear | None, embedding: Embedding | None) -> Tensor:
    """The rows of the tokens [V, D], of a head or of the embedding that takes its place."""
    if head is not None:
        return head.weight
    assert embedding is not None
    return embedding.tokens.weight


def scores(x: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Of every token, [..., V] fp32, for hidden states [..., D]; the products are in x's dtype."""
    products = F.linear(x, weight_VD.to(x.dtype)).float()
    return products if bias_V is None else products + bias_V
