"""T5: an encoder reads a text with spans taken out, a decoder writes the spans.

Positions are T5's relative bias (arXiv 1910.10683, section 2.1), or Megatron-LM's learned table.
One embedding serves encoder, decoder and, if tied, the head.

In a pipeline the blocks of the encoder come first, then the decoder's: between stages travel the
encoder's hidden states, and with them the decoder's once it has begun.

Letters: B sequences, S tokens of the encoder, R tokens of the decoder, N segments of a sequence, D
hidden, H heads, V padded vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import Attention, BlockContext, context_of
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding
from mb_train.models.head import bias_of_scores, head_weight, own_head, scores
from mb_train.models.linear import Linear
from mb_train.models.output import ExpertReports, ModelOutput
from mb_train.models.relative import RelativeBias
from mb_train.models.segments import Segments, flash_takes, within_segments
from mb_train.models.stack import Stack
from mb_train.models.transformer import Block

ALIKE = 44.0  # a token's score at first with itself on the other side, were its state its own alone


class T5(nn.Module):
    """A T5, or one stage of it.

    With relative positions a cross attention has none, and a decoder finds the place of a span by
    the token that stands for it alone. That is learned late: until the encoder says something of
    use there, looking there is no use, and the other way round. So a head's keys are made at first
    as its queries are (mimetic initialisation, arXiv 2305.09828), and a token looks for itself.

    Args:
        config: of the encoder; positions "relative" or "learned".
        decoder_layers: of the decoder, which is else as the encoder.
        decoder_moe_layers: which of them have experts; None means all, if there are any.
        scale_head: multiply hidden states by D^-1/2 before a tied head, and begin with embeddings
            of variance 1, for which that is (T5 1.0).
        compute_dtype: dtype of the activations; parameters are made in fp32.
    """

    head_bias: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        *,
        decoder_layers: int,
        decoder_moe_layers: tuple[bool, ...] | None = None,
        scale_head: bool = False,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        config.require_plain("a T5")
        if config.output_gate or config.rope_layers is not None:
            raise ValueError(
                "Expected no gates, and positions alike in all layers, for a T5, got output_gate "
                f"{config.output_gate} and rope_layers {config.rope_layers}."
            )
        self.config = config
        self.cross_entropy = linear_cross_entropy
        self.compute_dtype = compute_dtype
        self.head_scale = config.hidden_size**-0.5 if scale_head else 1.0
        # Which of the ends are here: tokens become states, the decoder begins, the loss comes out.
        self.first = self.begins = self.last = True
        self.embedding: Embedding | None = Embedding(config)
        if scale_head:
            nn.init.normal_(self.embedding.tokens.weight)
        self.encoder = Stack(config, compute_dtype=compute_dtype)
        decoder = replace(config, num_layers=decoder_layers, moe_layers=decoder_moe_layers)
        self.decoder = Stack(decoder, cross=True, compute_dtype=compute_dtype)
        self.encoder_bias: RelativeBias | None = None
        self.decoder_bias: RelativeBias | None = None
        if config.positions == "relative":
            self.encoder_bias = RelativeBias(config, bidirectional=True)
            self.decoder_bias = RelativeBias(config, bidirectional=False)
            for block in self.decoder.blocks.values():
                assert isinstance(block, Block)
                assert block.cross is not None
                _look_for_itself(block.cross, config)
        self.head: Linear | None = own_head(config)
        self.register_parameter("head_bias", bias_of_scores(config))

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cut the model down to a pipeline stage: these blocks, and what the ends need.

        Args:
            layers: the encoder's from 0 to L - 1, the decoder's from L on.
            first: tokens come in here. last: the loss comes out here.

        The first stage has both tables of relative positions, the others those of their blocks;
        they are to stay equal.
        """
        L = self.config.num_layers
        self.first, self.begins, self.last = first, L in layers, last
        self.encoder.keep(range(layers.start, min(layers.stop, L)), last=L - 1 in layers)
        self.decoder.keep(range(max(layers.start - L, 0), max(layers.stop - L, 0)), last=last)
        if not (first or self.encoder.blocks):
            self.encoder_bias = None
        if not (first or self.decoder.blocks):
            self.decoder_bias = None
        if not last:
            self.head = None
            self.register_parameter("head_bias", None)
        assert self.embedding is not None
        tied = last and self.config.tie_embeddings
        self.embedding = self.embedding.of_stage(embeds=first or self.begins, head=tied)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        ends_BN: Tensor,
        valid_BS: Tensor,
        decoder_tokens_BR: Tensor,
        decoder_ends_BN: Tensor,
        decoder_valid_BR: Tensor,
        labels_BR: Tensor,
        weights_BR: Tensor,
        kept_T: Tensor | None = None,
        decoder_kept_T: Tensor | None = None,
    ) -> ModelOutput:
        """The loss of writing the spans, named "lm loss".

        Args:
            x: tokens of the encoder [B, S], int64; on a stage that is not the first the encoder's
                hidden states [B, S, D], behind the decoder's [B, R, D] if it has begun.
            ends_BN, decoder_ends_BN: the place behind each segment, int64, ascending to S and to R;
                tokens attend within one, the decoder's to the encoder's of the same number too.
                Padding is the last. [B, 1] if there is none.
            valid_BS, decoder_valid_BR: nonzero for tokens that are not padding.
            decoder_tokens_BR: what the decoder reads; labels_BR: what it has to write, int64; one
                of weight 0 may be negative.
            weights_BR: fp32 weight of each label's loss in the sum.
            kept_T, decoder_kept_T: the places that blocks see, see `segments.Segments`.
        """
        x_BRD, memory_BSD = x if isinstance(x, tuple) else (None, x)
        read = Segments(ends_BN, valid_BS.shape[1], kept_T)
        written = Segments(decoder_ends_BN, decoder_valid_BR.shape[1], decoder_kept_T)
        reports = ExpertReports(self.encoder.num_moe_layers)
        if self.first or len(self.encoder.blocks):
            memory_BSD, reports = self.encode(memory_BSD, read, valid_BS)
        if self.encoder.narrow is not None and not self.last:  # states travel in fp32
            memory_BSD = memory_BSD.float()
        if x_BRD is None and not self.begins:
            reports = ExpertReports.joined(reports, ExpertReports(self.decoder.num_moe_layers))
            return reports.output(memory_BSD, {})
        x_BRD, decoder_reports = self.decode(
            decoder_tokens_BR if x_BRD is None else x_BRD,
            written,
            decoder_valid_BR,
            memory_BSD,
            read,
        )
        reports = ExpertReports.joined(reports, decoder_reports)
        if not self.last:
            return reports.output((x_BRD, memory_BSD), {})
        loss = self.cross_entropy(
            x_BRD * self.head_scale,
            head_weight(self.head, self.embedding),
            written.keep(labels_BR),
            written.keep(weights_BR),
            bias_V=self.head_bias,
            reduction="sum",
        )
        return reports.output(None, {"lm loss": loss})

    def encode(self, x: Tensor, read: Segments, valid_BS: Tensor) -> tuple[Tensor, ExpertReports]:
        """The encoder's hidden states, and what its experts report.

        Args:
            x: its tokens [B, S]; hidden states on a stage that is not the first.
            read: their segments. States are of the places that it keeps.
        """
        positions_BS = read.keep(read.positions())
        context = context_of(
            read, positions_BS, valid_BS, self.config, causal=False, relative=self.encoder_bias,
            dtype=self.compute_dtype, training=self.training,
        )  # fmt: skip
        x_BSD = self._embed(read.keep(x), positions_BS) if self.first else x
        return self.encoder(x_BSD, context)

    def decode(
        self,
        x: Tensor,
        written: Segments,
        valid_BR: Tensor,
        memory_BSD: Tensor,
        read: Segments,
    ) -> tuple[Tensor, ExpertReports]:
        """The decoder's hidden states, and what its experts report.

        Args:
            x: its tokens [B, R]; hidden states on a stage that it does not begin on.
            written: their segments. States are of the places that it keeps.
            memory_BSD: what `encode` returned, read: what it was given.
        """
        if self.encoder.narrow is not None:
            memory_BSD = memory_BSD.to(self.encoder.narrow)
        positions_BR = written.keep(written.positions())
        context = context_of(
            written, positions_BR, valid_BR, self.config, causal=True, relative=self.decoder_bias,
            dtype=self.compute_dtype, training=self.training,
        )  # fmt: skip
        config, device = self.config, valid_BR.device
        flash = flash_takes(config, self.compute_dtype, device, training=self.training)
        within = within_segments(written, causal=False, flash=flash, attended=read)
        cross = BlockContext(**within, source_BSD=memory_BSD)
        x_BRD = self._embed(written.keep(x), positions_BR) if self.begins else x
        return self.decoder(x_BRD, context, cross)

    @torch.no_grad()
    def write(
        self, tokens_BS: Tensor, ends_BN: Tensor, valid_BS: Tensor, *, first: int, length: int
    ) -> Tensor:
        """The likeliest token after the likeliest tokens before it, int64 [B, length].

        Args:
            tokens_BS, ends_BN, valid_BS: what the encoder reads, a sample to a sequence.
            first: the token that the decoder begins with.
        """
        read = Segments(ends_BN, tokens_BS.shape[1])
        memory_BSD, _ = self.encode(tokens_BS, read, valid_BS)
        written_BR = torch.full_like(tokens_BS[:, :1], first)
        for written in range(1, length + 1):
            own = Segments(torch.full_like(ends_BN, written), written)
            x_BRD, _ = self.decode(written_BR, own, torch.ones_like(written_BR), memory_BSD, read)
            next_B1 = self.logits(x_BRD[:, -1:]).argmax(2)
            written_BR = torch.cat([written_BR, next_B1], dim=1)
        return written_BR[:, 1:]

    def logits(self, x_BRD: Tensor) -> Tensor:
        """Scores of the next token after each of the decoder's, [B, R, V] fp32."""
        weight_VD = head_weight(self.head, self.embedding)
        return scores(x_BRD * self.head_scale, weight_VD, self.head_bias)

    def _embed(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.embedding(tokens_BS, positions_BS).to(self.compute_dtype)


@torch.no_grad()
def _look_for_itself(cross: Attention, config: TransformerConfig) -> None:
    """Make keys from states as queries are made, those of the first head of each group."""
    groups, head = config.num_kv_heads, config.head_size
    scale = config.attention_scale or head**-0.5
    q_GRCD = cross.q.weight.unflatten(0, (groups, -1, head))
    kv_G2CD = cross.kv.weight.unflatten(0, (groups, 2, head))
    nn.init.normal_(q_GRCD[:, 0], std=math.sqrt(ALIKE / (head * scale * config.hidden_size)))
    kv_G2CD[:, 0] = q_GRCD[:, 0]
