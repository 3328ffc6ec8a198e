"""GPT: embeddings, causal pre-LN blocks, and a head with its loss that never keeps the logits.

By its configuration it is GPT-2 (learned positions, layer norm, tied head) or what came after:
rotary positions, RMS norm, gated feed-forward, grouped queries, experts (OLMoE, Qwen3-MoE).

A model may be one stage of a pipeline: `keep` cuts it down to a run of its blocks. Parameter names
hold the layer's number in the whole model either way.

Behind its last layer may be modules that learn to predict further tokens (`models.mtp`). They are
there to be trained: what the model computes of a text does without them.

Letters: B sequences, S tokens of a sequence, D hidden, V padded vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mb_kernels import linear_cross_entropy
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.cache import KVCache
from mb_train.models.config import TransformerConfig
from mb_train.models.embedding import Embedding, running_positions
from mb_train.models.gated_delta import delta_kernel
from mb_train.models.head import bias_of_scores, head_weight, own_head, scores
from mb_train.models.linear import Linear
from mb_train.models.mtp import (
    FurtherPrediction,
    further_labels,
    further_loss,
    further_positions,
    further_weights,
)
from mb_train.models.output import ExpertReports, ModelOutput, of_weight
from mb_train.models.rotary import ropes
from mb_train.models.segments import (
    Segments,
    flash_takes,
    seen,
    segment_mask,
    within_segments,
)
from mb_train.models.stack import Stack
from mb_train.models.states import StateContext, begins_of


class GPT(nn.Module):
    """A GPT, or one stage of it.

    Args:
        config: sizes and choices.
        compute_dtype: dtype of the activations; parameters are made in fp32.

    Attributes:
        embedding: None on a stage that neither begins the model nor ends it with a tied head or
            with modules for further tokens.
        stack: the blocks and the final norm.
        head: on the last stage, if it is not tied to the embedding.
        head_bias: on the last stage, if the model has one.
        mtp: modules for further tokens, by number from "0" on; all of them are on the last stage.
        parts: how many parts sequences are in. With several the model is given one of them, and
            its attention cores bring them together (`mb_parallel.context_parallel`).
    """

    head_bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if config.positions == "relative":
            raise ValueError(
                "Expected learned, rotary or no positions for a GPT, got T5's relative bias."
            )
        self.config, self.compute_dtype = config, compute_dtype
        self.cross_entropy = linear_cross_entropy
        self.first = self.last = True
        self.parts = 1
        self.embedding: Embedding | None = Embedding(config)
        self.stack = Stack(config, compute_dtype=compute_dtype)
        self.head: Linear | None = own_head(config)
        self.register_parameter("head_bias", bias_of_scores(config))
        modules = [
            FurtherPrediction(config, compute_dtype=compute_dtype)
            for _ in range(config.mtp_modules)
        ]
        self.mtp = nn.ModuleDict({str(number): module for number, module in enumerate(modules)})
        self._moe_layers_behind = sum(module.stack.num_moe_layers for module in modules)
        names = further_labels, further_weights, further_positions
        self._further = {name(k + 1) for k in range(config.mtp_modules) for name in names}

    def keep(self, layers: range, *, first: bool, last: bool) -> None:
        """Cut the model down to a pipeline stage: these blocks, and what the ends need.

        Args:
            first: tokens come in here. Otherwise hidden states.
            last: the loss comes out here. With a tied head, or modules for further tokens, this
                stage has a copy of the embedding.
        """
        self.first, self.last = first, last
        self.stack.keep(layers, last=last)
        if not last:
            self.head = None
            self.register_parameter("head_bias", None)
            self.mtp.clear()
        assert self.embedding is not None
        tied = last and self.config.tie_embeddings
        self.embedding = self.embedding.of_stage(embeds=first or len(self.mtp) > 0, head=tied)

    def forward(
        self,
        x: Tensor,
        *,
        labels_BS: Tensor,
        weights_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        ends_BN: Tensor | None = None,
        **further: Tensor,
    ) -> ModelOutput:
        """The loss of predicting each label, named "lm loss"; hidden states if not the last stage.

        In training also those of further tokens, "mtp_1 loss", ..., which are told as they are and
        train with a weight (`models.output.of_weight`).

        Args:
            x: tokens [B, S], int64; hidden states [B, S, D] on a stage that is not the first.
            labels_BS: int64 in [0, V).
            weights_BS: fp32 weight of each label's loss in the sum; None is 1 / (B S), the mean.
            positions_BS: of each token; None counts from 0 in every sequence. Of a part they have
                to be given.
            segments_BS: integer document of each token, for attention within documents alone; of
                the whole sequences, where x is a part of them.
            ends_BN: the same in another form, the place behind each document, ascending to the end
                of the whole sequence; the GPU's kernel takes no other (`models.segments`).
            further: for k = 1, 2, ... of the modules for further tokens labels_k_BS, weights_k_BS
                and, where positions are learned, positions_k_BS: the same k places on.
        """
        assert further.keys() <= self._further
        if positions_BS is None:
            assert self.parts == 1
            positions_BS = running_positions(labels_BS)
        x_BSD, reports, context = self._hidden(x, positions_BS, segments_BS, ends_BN)
        if not self.last:
            return self._of_all_modules(reports).output(x_BSD, {})
        if weights_BS is None:
            weights_BS = torch.full_like(labels_BS, 1 / labels_BS.numel(), dtype=torch.float32)
        losses = {"lm loss": self._loss(x_BSD, labels_BS, weights_BS)}
        if not self.training or not self.mtp:
            return self._of_all_modules(reports).output(None, losses)
        batch = {further_labels(0): labels_BS, further_positions(0): positions_BS, **further}
        told = [reports]
        for k, module in enumerate(self.mtp.values(), 1):
            # A token's label is the token one place on.
            next_BSD = self._embedded(batch[further_labels(k - 1)], _positions(batch, k))
            x_BSD, of_module = module(x_BSD, next_BSD, context)
            told.append(of_module)
            loss = self._loss(x_BSD, batch[further_labels(k)], batch[further_weights(k)])
            losses[further_loss(k)] = of_weight(loss, self.config.mtp_loss_weight / len(self.mtp))
        return ExpertReports.joined(*told).output(None, losses)

    def logits(self, tokens_BS: Tensor, *, at_B: Tensor | None = None) -> Tensor:
        """Scores of the next token, [B, S, V] fp32; [B, V] after `at_B`.

        Args:
            at_B: int64, a place in each sequence; or [B, N] for several, and scores [B, N, V].
        """
        x_BSD, _, _ = self._hidden(tokens_BS, running_positions(tokens_BS))
        if at_B is not None:
            rows_B = torch.arange(len(at_B), device=at_B.device)
            x_BSD = x_BSD[rows_B[:, None] if at_B.ndim == 2 else rows_B, at_B]
        return self._scores(x_BSD)

    def go_on(self, tokens_BQ: Tensor, new_B: Tensor, cache: KVCache) -> Tensor:
        """Scores after each row's last new token, [B, V] fp32; `cache` then holds the new ones too.

        Args:
            tokens_BQ: new tokens of each row, filled up behind.
            new_B: int64, how many of them are the row's, at least one.
            cache: of the tokens before them, with room reserved for these; a fresh one if there
                are none before them.
        """
        positions_BQ, mask, valid_BQ = cache.begin(new_B, tokens_BQ.shape[1])
        # Fillings may lie beyond the table of positions.
        x_BQD = self._embedded(tokens_BQ, torch.where(valid_BQ, positions_BQ, 0))
        masks = seen(self.config, mask, positions_BQ, self.compute_dtype)
        states = self._states(tokens_BQ.device, None)
        turns = ropes(self.config, positions_BQ)
        context = BlockContext(**masks, **turns, valid_BS=valid_BQ, cache=cache, states=states)
        x_BQD, _ = self.stack(x_BQD, context)
        x_BD = x_BQD[torch.arange(len(new_B), device=new_B.device), new_B - 1]
        return self._scores(x_BD)

    def _hidden(
        self,
        x: Tensor,
        positions_BS: Tensor,
        segments_BS: Tensor | None = None,
        ends_BN: Tensor | None = None,
    ) -> tuple[Tensor, ExpertReports, BlockContext]:
        """Final hidden states of this stage (normed on the last), and what the experts report.

        Also what the blocks share, for those behind them.
        """
        if self.first:
            x = self._embedded(x, positions_BS)
        within = self._within(len(x), positions_BS, segments_BS, ends_BN)
        if segments_BS is None and ends_BN is not None and self.config.has_states:
            segments_BS = Segments(ends_BN, positions_BS.shape[1] * self.parts).numbers()
        states = self._states(x.device, segments_BS)
        turns = ropes(self.config, positions_BS)
        context = BlockContext(**within, **turns, states=states)
        return *self.stack(x, context), context

    def _states(self, device: torch.device, segments_BS: Tensor | None) -> StateContext | None:
        """What layers with a state share, if there are any."""
        if not self.config.has_states:
            return None
        begins_BS = None if segments_BS is None else begins_of(segments_BS)
        delta = self.config.delta
        return StateContext(begins_BS, None if delta is None else delta_kernel(delta.key, device))

    def _embedded(self, tokens_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """x_BSD, as the first block takes it."""
        assert self.embedding is not None
        x_BSD = self.embedding(tokens_BS, positions_BS).to(self.compute_dtype)
        multiplier = self.config.embedding_multiplier
        return x_BSD if multiplier == 1 else multiplier * x_BSD

    def _loss(self, x_BSD: Tensor, labels_BS: Tensor, weights_BS: Tensor) -> Tensor:
        weight_VD = head_weight(self.head, self.embedding)
        x_BSD = self._scaled(x_BSD)
        return self.cross_entropy(
            x_BSD, weight_VD, labels_BS, weights_BS, bias_V=self.head_bias, reduction="sum"
        )

    def _scores(self, x: Tensor) -> Tensor:
        weight_VD = head_weight(self.head, self.embedding)
        return scores(self._scaled(x), weight_VD, self.head_bias)

    def _scaled(self, x: Tensor) -> Tensor:
        """Hidden states of which the head makes scores."""
        divisor = self.config.logits_scaling
        return x if divisor == 1 else x / divisor

    def _of_all_modules(self, reports: ExpertReports) -> ExpertReports:
        """Reports whose mean is over the experts of modules for further tokens too."""
        return ExpertReports.joined(reports, ExpertReports(self._moe_layers_behind))

    def _within(
        self, B: int, positions_BS: Tensor, segments_BS: Tensor | None, ends_BN: Tensor | None
    ) -> dict[str, Any]:
        """What the tokens of B whole sequences see, as a `BlockContext` has it."""
        config, dtype, device = self.config, self.compute_dtype, positions_BS.device
        within: dict[str, Any] = {"causal": True}
        S, whole = positions_BS.shape[1] * self.parts, config.plain_attention
        if segments_BS is not None and ends_BN is None:
            within["mask"] = segment_mask(segments_BS, causal=True)
        elif ends_BN is not None or not whole:
            flash = flash_takes(config, dtype, device, training=self.training)
            ends_BN = torch.full((B, 1), S, device=device) if ends_BN is None else ends_BN
            segments = Segments(ends_BN, S)
            within = within_segments(segments, causal=True, flash=flash, whole=whole)
        if whole or "bounds" in within:
            return within
        places_1S = torch.arange(S, device=device)[None]
        return within | seen(config, within.get("mask"), places_1S, dtype)


def _positions(batch: Mapping[str, Tensor], k: int) -> Tensor:
    """Of the tokens k places on, which matter where they are learned, or else of any."""
    return batch.get(further_positions(k), batch[further_positions(0)])
