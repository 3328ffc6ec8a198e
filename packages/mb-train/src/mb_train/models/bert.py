"""BERT: a bidirectional encoder that restores hidden tokens and tells the order of two segments.

Pre-LN as in Megatron-LM, or post-LN with a normed embedding as in the first BERT
(`TransformerConfig.norms`). The head computes only at the places that are asked for, a seventh
of a sequence.

A sequence holds one sample and its padding, or several short samples one behind the other: each
sees itself alone and counts its positions from 0.

Letters: B sequences, S tokens of a sequence, M masked places of a sequence, P samples of a sequence
at most, N segments of a sequence (its samples and the padding), D hidden, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import context_of
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding
from mb_train.models.head import scores
from mb_train.models.linear import Linear, Norm
from mb_train.models.output import ExpertReports, ModelOutput
from mb_train.models.relative import RelativeBias
from mb_train.models.segments import Segments
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
    """tanh of a linear map of the first token of a sample, in the shape of its state."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, std=config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x))


class Bert(nn.Module):
    """A BERT, or one stage of it.

    Args:
        config: sizes and choices.
        binary_head: learn which of two segments comes first, from the first token.
        compute_dtype: dtype of the activations; parameters are made in fp32.

    Attributes:
        embedding, bias (of relative positions), stack: the encoder. lm_head, pooler, order_head: on
            the last stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        binary_head: bool = True,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        config.require_plain("a BERT")
        self.config = config
        self.cross_entropy = linear_cross_entropy
        self.compute_dtype = compute_dtype
        self.first = self.last = True
        self.embedding: Embedding | None = Embedding(config, token_types=2)
        self.bias: RelativeBias | None = None
        if config.positions == "relative":
            self.bias = RelativeBias(config, bidirectional=True)
        self.stack = Stack(config, compute_dtype=compute_dtype)
        self.lm_head: LMHead | None = LMHead(config)
        self.pooler: Pooler | None = Pooler(config) if binary_head else None
        self.order_head: Linear | None = None
        if binary_head:
            self.order_head = Linear(config.hidden_size, 2, std=config.init_std)

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cut the model down to a pipeline stage: these blocks, and what the ends need.

        Each stage keeps the table of relative positions, which are to stay equal.
        """
        self.first, self.last = first, last
        self.stack.keep(layers, last=last)
        if not last:
            self.lm_head = self.pooler = self.order_head = None
        assert self.embedding is not None
        self.embedding = self.embedding.of_stage(embeds=first, head=self.lm_head is not None)

    def forward(
        self,
        x: Tensor,
        *,
        token_types_BS: Tensor,
        ends_BN: Tensor,
        valid_BS: Tensor,
        masked_BM: Tensor,
        labels_BM: Tensor,
        weights_BM: Tensor,
        kept_T: Tensor | None = None,
        first_BP: Tensor | None = None,
        order_BP: Tensor | None = None,
        order_weights_BP: Tensor | None = None,
    ) -> ModelOutput:
        """Losses of restoring the masked tokens ("lm loss") and of the order ("sop loss").

        Args:
            x: tokens [B, S], int64; hidden states [B, S, D] on a stage that is not the first.
            token_types_BS: 0 in the first segment of a sample, 1 in the second.
            ends_BN: the place behind each sample of a sequence and, last, behind its padding, int64
                ascending to S; [B, 1] if no sequence has padding or a second sample.
            valid_BS: nonzero for tokens that are not padding.
            masked_BM: places to restore, labels_BM their tokens, both int64; a row with fewer than
                M is filled up with places of weight 0, whose label may be negative.
            weights_BM: fp32 weight of each place's loss in the sum.
            kept_T: the places that blocks see, see `segments.Segments`; None: all.
            first_BP: the samples' first places; order_BP: int64, 1 where the segments of a
                sample were swapped; order_weights_BP: fp32, 0 where a sequence has fewer than P.
        """
        x_BSD, reports = self.encode(x, token_types_BS, ends_BN, valid_BS, kept_T)
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
            assert first_BP is not None
            assert order_BP is not None
            assert order_weights_BP is not None
            scores_BP2 = self.order(x_BSD, first_BP)
            losses_BP = F.cross_entropy(scores_BP2.mT, order_BP, reduction="none")
            losses[ORDER_LOSS] = (losses_BP * order_weights_BP).sum()
        return reports.output(None, losses)

    def order(self, x_BSD: Tensor, first_BP: Tensor) -> Tensor:
        """Scores of the segments' order, as it was and swapped, [B, P, 2] fp32."""
        assert self.order_head is not None
        assert self.pooler is not None
        return self.order_head(self.pooler(_at(x_BSD, first_BP))).float()

    def logits(self, x_BSD: Tensor, places_BM: Tensor) -> Tensor:
        """Scores of every token at some places of encoded sequences, [B, M, V] fp32."""
        assert self.lm_head is not None
        assert self.embedding is not None
        x_BMD = self.lm_head(_at(x_BSD, places_BM))
        return scores(x_BMD, self.embedding.tokens.weight, self.lm_head.bias)

    def encode(
        self,
        x: Tensor,
        token_types_BS: Tensor,
        ends_BN: Tensor,
        valid_BS: Tensor,
        kept_T: Tensor | None = None,
    ) -> tuple[Tensor, ExpertReports]:
        """Final hidden states of this stage, and what the experts report.

        [B, S, D], 0 at places that are not kept; stages pass on what blocks see.
        """
        segments = Segments(ends_BN, valid_BS.shape[1], kept_T)
        positions_BS = segments.keep(segments.positions())
        if self.first:
            assert self.embedding is not None
            x = self.embedding(segments.keep(x), positions_BS, segments.keep(token_types_BS))
            x = x.to(self.compute_dtype)
        context = context_of(
            segments, positions_BS, valid_BS, self.config, causal=False, relative=self.bias,
            dtype=self.compute_dtype, training=self.training,
        )  # fmt: skip
        x, reports = self.stack(x, context)
        return segments.spread(x) if self.last else x, reports


def _at(x_BSD: Tensor, places_BM: Tensor) -> Tensor:
    """Hidden states at some places of each sequence, [B, M, D]."""
    return x_BSD.gather(1, places_BM[..., None].expand(-1, -1, x_BSD.shape[2]))
