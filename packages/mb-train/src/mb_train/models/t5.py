"""T5: an encoder reads a text with spans taken out, a decoder writes the spans.

Positions are T5's relative bias (arXiv 1910.10683, section 2.1), or Megatron-LM's learned table.
One embedding serves encoder, decoder and, if tied, the head.

Letters: B sequences, S tokens of the encoder, R tokens of the decoder, N segments of a sequence, D
hidden, H heads, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import BlockContext, rotary_tables
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding, running_positions
from mb_train.models.linear import Linear
from mb_train.models.output import ExpertReports, ModelOutput
from mb_train.models.relative import RelativeBias
from mb_train.models.segments import flash_takes, within_segments
from mb_train.models.stack import Stack


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
        ends_BN: Tensor,
        valid_BS: Tensor,
        decoder_tokens_BR: Tensor,
        decoder_ends_BN: Tensor,
        decoder_valid_BR: Tensor,
        labels_BR: Tensor,
        weights_BR: Tensor,
    ) -> ModelOutput:
        """The loss of writing the spans, named "lm loss".

        Args:
            x: tokens of the encoder [B, S], int64.
            ends_BN, decoder_ends_BN: the place behind each segment, int64, ascending to S and to R;
                tokens attend within one, the decoder's to the encoder's of the same number too.
                Padding is the last. [B, 1] if there is none.
            valid_BS, decoder_valid_BR: nonzero for tokens that are not padding.
            decoder_tokens_BR: what the decoder reads; labels_BR: what it has to write, int64 in
                [0, V) even where their weight is 0.
            weights_BR: fp32 weight of each label's loss in the sum.
        """
        memory_BSD, encoder_reports = self.encode(x, ends_BN, valid_BS)
        x_BRD, decoder_reports = self.decode(
            decoder_tokens_BR, decoder_ends_BN, decoder_valid_BR, memory_BSD, (ends_BN, x.shape[1])
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
        self, tokens_BS: Tensor, ends_BN: Tensor, valid_BS: Tensor
    ) -> tuple[Tensor, ExpertReports]:
        """The encoder's hidden states [B, S, D], and what its experts report."""
        length = tokens_BS.shape[1]
        bias = None if self.encoder_bias is None else self.encoder_bias(length)
        flash = self._flash(tokens_BS, bias)
        context = BlockContext(
            **within_segments(ends_BN, length, causal=False, flash=flash),
            bias=bias,
            rope=self._rope(tokens_BS),
            valid_BS=valid_BS,
        )
        return self.encoder(self._embed(tokens_BS), context)

    def decode(
        self,
        tokens_BR: Tensor,
        ends_BN: Tensor,
        valid_BR: Tensor,
        memory_BSD: Tensor,
        attended: tuple[Tensor, int],
    ) -> tuple[Tensor, ExpertReports]:
        """The decoder's hidden states [B, R, D], and what its experts report.

        Args:
            memory_BSD: what `encode` returned; attended: the ends there, and S.
        """
        length = tokens_BR.shape[1]
        bias = None if self.decoder_bias is None else self.decoder_bias(length)
        context = BlockContext(
            **within_segments(ends_BN, length, causal=True, flash=self._flash(tokens_BR, bias)),
            bias=bias,
            rope=self._rope(tokens_BR),
            valid_BS=valid_BR,
        )
        flash = self._flash(tokens_BR)
        within = within_segments(ends_BN, length, causal=False, flash=flash, attended=attended)
        cross = BlockContext(**within, source_BSD=memory_BSD)
        return self.decoder(self._embed(tokens_BR), context, cross)

    @torch.no_grad()
    def write(
        self, tokens_BS: Tensor, ends_BN: Tensor, valid_BS: Tensor, *, first: int, length: int
    ) -> Tensor:
        """The likeliest token after the likeliest tokens before it, int64 [B, length].

        Args:
            tokens_BS, ends_BN, valid_BS: what the encoder reads, a sample to a sequence.
            first: the token that the decoder begins with.
        """
        memory_BSD, _ = self.encode(tokens_BS, ends_BN, valid_BS)
        attended = ends_BN, tokens_BS.shape[1]
        written_BR = torch.full_like(tokens_BS[:, :1], first)
        for written in range(1, length + 1):
            own_BN = torch.full_like(ends_BN, written)
            x_BRD, _ = self.decode(
                written_BR, own_BN, torch.ones_like(written_BR), memory_BSD, attended
            )
            next_B1 = self.logits(x_BRD[:, -1:]).argmax(2)
            written_BR = torch.cat([written_BR, next_B1], dim=1)
        return written_BR[:, 1:]

    def logits(self, x_BRD: Tensor) -> Tensor:
        """Scores of the next token after each of the decoder's, [B, R, V] fp32."""
        x_BRD = x_BRD * self.head_scale
        logits = (x_BRD @ self._head_weight().to(x_BRD.dtype).t()).float()
        return logits if self.head_bias is None else logits + self.head_bias

    def _flash(self, tokens: Tensor, bias: Tensor | None = None) -> bool:
        how = {"training": self.training, "bias": bias}
        return flash_takes(self.config, self.compute_dtype, tokens.device, **how)

    def _rope(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return rotary_tables(self.config, running_positions(tokens))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens, running_positions(tokens)).to(self.compute_dtype)

    def _head_weight(self) -> Tensor:
        return self.embedding.tokens.weight if self.head is None else self.head.weight
