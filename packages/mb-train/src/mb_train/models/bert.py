"""BERT: a bidirectional encoder that restores hidden tokens and tells the order of two segments.

Pre-LN as in Megatron-LM, or post-LN with a normed embedding as in the first BERT
(`TransformerConfig.post_norm`). The head computes only at the places that are asked for, a seventh
of a sequence.

Letters: B sequences, S tokens of a sequence, M masked places of a sequence, D hidden, V padded
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import BlockContext, rotary_tables, segment_mask
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding, running_positions
from mb_train.models.linear import Linear, Norm
from mb_train.models.output import ModelOutput
from mb_train.models.stack import Stack

LM_LOSS, ORDER_LOSS = "lm loss", "sop loss"


class LMHead(nn.Module):
    """Linear, GELU, norm; the scores are the products with the token embedding, plus a bias."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        D = config.hidden_size
        self.dense = Linear(D, D, std=config.init_std)
        self.norm = Norm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """What is multiplied with the embedding, in the shape of x [..., D]."""
        return self.norm(F.gelu(self.dense(x)))


class Pooler(nn.Module):
    """tanh of a linear map of the first token's hidden state, [B, D]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, std=config.init_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BSD[:, 0]))


class Bert(nn.Module):
    """A BERT, or one stage of it.

    Args:
        config: sizes and choices.
        binary_head: learn which of two segments comes first, from the first token.
        compute_dtype: dtype of the activations; parameters are made in fp32.

    Raises:
        ValueError: relative positions.

    Attributes:
        embedding, stack: the encoder. lm_head, pooler, order_head: on the last stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        binary_head: bool = True,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if config.positions == "relative":
            raise ValueError("Expected learned or rotary positions of a BERT, got T5's relative.")
        self.config = config
        self.cross_entropy = linear_cross_entropy
        self.compute_dtype = compute_dtype
        self.first = self.last = True
        self.embedding: Embedding | None = Embedding(config, token_types=2)
        self.stack = Stack(config, compute_dtype=compute_dtype)
        self.lm_head: LMHead | None = LMHead(config)
        self.pooler: Pooler | None = Pooler(config) if binary_head else None
        self.order_head: Linear | None = None
        if binary_head:
            self.order_head = Linear(config.hidden_size, 2, std=config.init_std)

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cut the model down to a pipeline stage: these blocks, and what the ends need."""
        self.first, self.last = first, last
        self.stack.keep(layers, last=last)
        if not last:
            self.lm_head = self.pooler = self.order_head = None
        if not first and last:
            assert self.embedding is not None
            self.embedding.keep_tokens()
        elif not first:
            self.embedding = None

    def forward(
        self,
        x: Tensor,
        *,
        token_types_BS: Tensor,
        segments_BS: Tensor,
        valid_BS: Tensor,
        masked_BM: Tensor,
        labels_BM: Tensor,
        weights_BM: Tensor,
        order_B: Tensor | None = None,
        order_weights_B: Tensor | None = None,
    ) -> ModelOutput:
        """Losses of restoring the masked tokens ("lm loss") and of the order ("sop loss").

        Args:
            x: tokens [B, S], int64; hidden states [B, S, D] on a stage that is not the first.
            token_types_BS: 0 in the first segment of a sample, 1 in the second.
            segments_BS: tokens attend within one id; padding has one of its own.
            valid_BS: nonzero for tokens that are not padding.
            masked_BM: places to restore, labels_BM their tokens, both int64; a row with fewer than
                M is filled up with places of weight 0.
            weights_BM: fp32 weight of each place's loss in the sum.
            order_B: int64, 1 where the segments were swapped; order_weights_B: their weights.
        """
        x_BSD, reports = self.encode(x, token_types_BS, segments_BS, valid_BS)
        if not self.last:
            return reports.output(x_BSD, {})
        assert self.lm_head is not None
        assert self.embedding is not None
        x_BMD = self.lm_head(_at(x_BSD, masked_BM))
        losses = {
            LM_LOSS: self.cross_entropy(
                x_BMD,
                self.embedding.tokens.weight,
                labels_BM,
                weights_BM,
                bias_V=self.lm_head.bias,
                reduction="sum",
            )
        }
        if self.order_head is not None and self.pooler is not None:
            assert order_B is not None
            assert order_weights_B is not None
            scores_B2 = self.order_head(self.pooler(x_BSD)).float()
            losses_B = F.cross_entropy(scores_B2, order_B, reduction="none")
            losses[ORDER_LOSS] = (losses_B * order_weights_B).sum()
        return reports.output(None, losses)

    def logits(self, x_BSD: Tensor, places_BM: Tensor) -> Tensor:
        """Scores of every token at some places of encoded sequences, [B, M, V] fp32."""
        assert self.lm_head is not None
        assert self.embedding is not None
        x_BMD = self.lm_head(_at(x_BSD, places_BM))
        weight_VD = self.embedding.tokens.weight.to(x_BMD.dtype)
        return (x_BMD @ weight_VD.t()).float() + self.lm_head.bias

    def encode(self, x: Tensor, token_types_BS: Tensor, segments_BS: Tensor, valid_BS: Tensor):
        """Final hidden states [B, S, D] of this stage, and what the experts report."""
        if self.first:
            assert self.embedding is not None
            x = self.embedding(x, running_positions(x), token_types_BS).to(self.compute_dtype)
        rope = None
        if self.config.positions == "rope":
            rope = rotary_tables(self.config, running_positions(segments_BS))
        context = BlockContext(
            causal=False,
            mask=segment_mask(segments_BS, causal=False),
            rope=rope,
            valid_BS=valid_BS,
        )
        return self.stack(x, context)


def _at(x_BSD: Tensor, places_BM: Tensor) -> Tensor:
    """Hidden states at some places of each sequence, [B, M, D]."""
    return x_BSD.gather(1, places_BM[..., None].expand(-1, -1, x_BSD.shape[2]))
