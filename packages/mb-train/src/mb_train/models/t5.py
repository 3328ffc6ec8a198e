"""T5: an encoder reads a text with spans taken out, a decoder writes the spans.

Positions are T5's relative bias (arXiv 1910.10683, section 2.1), or Megatron-LM's learned table.
One embedding serves encoder, decoder and, if tied, the head.

Letters: B samples, S tokens of the encoder, R tokens of the decoder, D hidden, H heads, V padded
vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import BlockContext, rotary_tables, segment_mask
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding, running_positions
from mb_train.models.linear import Linear
from mb_train.models.output import ExpertReports, ModelOutput
from mb_train.models.stack import Stack

NUM_BUCKETS, MAX_DISTANCE = 32, 128  # T5's own


class RelativeBias(nn.Module):
    """A learned number per head and bucket of distances, added to the scores.

    Args:
        config: heads and init.
        bidirectional: half of the buckets is for tokens to come; otherwise those are not seen.
    """

    def __init__(self, config: TransformerConfig, *, bidirectional: bool) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(NUM_BUCKETS, config.num_heads)
        nn.init.normal_(self.table.weight, std=config.init_std)

    def forward(self, length: int) -> Tensor:
        """The bias of a sequence with itself, [1, H, length, length] in the table's dtype."""
        positions = torch.arange(length, device=self.table.weight.device)
        buckets_QS = relative_buckets(
            positions[None] - positions[:, None], bidirectional=self.bidirectional
        )
        return self.table(buckets_QS).permute(2, 0, 1)[None]


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


class T5(nn.Module):
    """A T5.

    Args:
        config: of the encoder; positions "relative" or "learned".
        decoder_layers: of the decoder, which is else as the encoder.
        head_bias: a bias per token on the scores (Megatron-LM).
        scale_head: multiply hidden states by D^-1/2 before a tied head (T5 1.0).
        compute_dtype: dtype of the activations; parameters are made in fp32.
    """

    head_bias: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        *,
        decoder_layers: int,
        head_bias: bool = False,
        scale_head: bool = False,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        self.cross_entropy = linear_cross_entropy
        self.compute_dtype = compute_dtype
        self.head_scale = config.hidden_size**-0.5 if scale_head else 1.0
        self.embedding = Embedding(config)
        self.encoder = Stack(config, compute_dtype=compute_dtype)
        decoder = replace(config, num_layers=decoder_layers, moe_layers=None)
        self.decoder = Stack(decoder, cross=True, compute_dtype=compute_dtype)
        self.encoder_bias = self.decoder_bias = None
        if config.positions == "relative":
            self.encoder_bias = RelativeBias(config, bidirectional=True)
            self.decoder_bias = RelativeBias(config, bidirectional=False)
        self.head: Linear | None = None
        if not config.tie_embeddings:
            size = (config.hidden_size, config.vocab_size)
            self.head = Linear(*size, std=config.init_std, bias=False)
        bias = nn.Parameter(torch.zeros(config.vocab_size)) if head_bias else None
        self.register_parameter("head_bias", bias)

    def forward(
        self,
        x: Tensor,
        *,
        segments_BS: Tensor,
        valid_BS: Tensor,
        decoder_tokens_BR: Tensor,
        decoder_segments_BR: Tensor,
        decoder_valid_BR: Tensor,
        labels_BR: Tensor,
        weights_BR: Tensor,
    ) -> ModelOutput:
        """The loss of writing the spans, named "lm loss".

        Args:
            x: tokens of the encoder [B, S], int64.
            segments_BS, decoder_segments_BR: tokens attend within one id, the decoder's to the
                encoder's of the same id; padding has an id that no other token has.
            valid_BS, decoder_valid_BR: nonzero for tokens that are not padding.
            decoder_tokens_BR: what the decoder reads; labels_BR: what it has to write, int64 in
                [0, V) even where their weight is 0.
            weights_BR: fp32 weight of each label's loss in the sum.
        """
        memory_BSD, encoder_reports = self.encode(x, segments_BS, valid_BS)
        x_BRD, decoder_reports = self.decode(
            decoder_tokens_BR, decoder_segments_BR, decoder_valid_BR, memory_BSD, segments_BS
        )
        loss = self.cross_entropy(
            x_BRD * self.head_scale,
            self._head_weight(),
            labels_BR,
            weights_BR,
            bias_V=self.head_bias,
            reduction="sum",
        )
        return ExpertReports.joined(encoder_reports, decoder_reports).output(
            None, {"lm loss": loss}
        )

    def encode(
        self, tokens_BS: Tensor, segments_BS: Tensor, valid_BS: Tensor
    ) -> tuple[Tensor, ExpertReports]:
        """The encoder's hidden states [B, S, D], and what its experts report."""
        bias = None if self.encoder_bias is None else self.encoder_bias(tokens_BS.shape[1])
        context = BlockContext(
            causal=False,
            mask=segment_mask(segments_BS, causal=False),
            bias=bias,
            rope=self._rope(tokens_BS),
            valid_BS=valid_BS,
        )
        return self.encoder(self._embed(tokens_BS), context)

    def decode(
        self,
        tokens_BR: Tensor,
        segments_BR: Tensor,
        valid_BR: Tensor,
        memory_BSD: Tensor,
        memory_segments_BS: Tensor,
    ) -> tuple[Tensor, ExpertReports]:
        """The decoder's hidden states [B, R, D], and what its experts report."""
        bias = None if self.decoder_bias is None else self.decoder_bias(tokens_BR.shape[1])
        context = BlockContext(
            causal=True,
            mask=segment_mask(segments_BR, causal=True),
            bias=bias,
            rope=self._rope(tokens_BR),
            valid_BS=valid_BR,
        )
        cross = BlockContext(
            causal=False,
            mask=segment_mask(segments_BR, memory_segments_BS, causal=False),
            source_BSD=memory_BSD,
        )
        return self.decoder(self._embed(tokens_BR), context, cross)

    @torch.no_grad()
    def write(self, tokens_BS: Tensor, valid_BS: Tensor, *, first: int, length: int) -> Tensor:
        """The likeliest token after the likeliest tokens before it, int64 [B, length].

        Args:
            tokens_BS, valid_BS: what the encoder reads; 0 for padding, 1 for the others.
            first: the token that the decoder begins with.
        """
        memory_BSD, _ = self.encode(tokens_BS, valid_BS, valid_BS)
        written_BR = torch.full_like(tokens_BS[:, :1], first)
        for _ in range(length):
            ones_BR = torch.ones_like(written_BR)
            x_BRD, _ = self.decode(written_BR, ones_BR, ones_BR, memory_BSD, valid_BS)
            next_B1 = self.logits(x_BRD[:, -1:]).argmax(2)
            written_BR = torch.cat([written_BR, next_B1], dim=1)
        return written_BR[:, 1:]

    def logits(self, x_BRD: Tensor) -> Tensor:
        """Scores of the next token after each of the decoder's, [B, R, V] fp32."""
        x_BRD = x_BRD * self.head_scale
        logits = (x_BRD @ self._head_weight().to(x_BRD.dtype).t()).float()
        return logits if self.head_bias is None else logits + self.head_bias

    def _rope(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return rotary_tables(self.config, running_positions(tokens))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens, running_positions(tokens)).to(self.compute_dtype)

    def _head_weight(self) -> Tensor:
        return self.embedding.tokens.weight if self.head is None else self.head.weight
