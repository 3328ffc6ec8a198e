"""Writing the spans that were taken out of a text: T5."""

from __future__ import annotations

from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.plans import t5_plan
from mb_train.models.t5 import T5
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import DataPaths, Datasets
from mb_train.tasks.bert import stacked


class T5Task:
    """See `base.Task`.

    Args:
        config: the run.
        tokenizer: with special tokens and sentinels (`--vocab-extra-ids`).
        vocab_size: padded.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    first_input = "tokens_BS"
    sentences = True

    def __init__(self, config: TrainConfig, tokenizer: Any, *, vocab_size: int) -> None:
        self.loss_weights = {"lm loss": "weights_BR"}
        self.sequence_length = whole(config.seq_length) + whole(config.decoder_seq_length)
        self.model_config = transformer_config(config, vocab_size)
        self.tied_parameters: dict[str, str] = {}
        self._config, self._tokenizer = config, tokenizer

    def build_model(self, *, compute_dtype: torch.dtype) -> T5:
        """A T5 with fresh weights; with Megatron's learned positions it has its head's bias too."""
        return T5(
            self.model_config,
            decoder_layers=self._config.decoder_layers,
            head_bias=self._config.position_embedding_type == "learned",
            compute_dtype=compute_dtype,
        )

    def tensor_plan(self) -> Plan:
        """See `models.plans`."""
        return t5_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """Megatron's samples over files that were split into sentences."""
        config = self._config
        return mb_data.build_t5_datasets(
            paths,
            tokenizer=self._tokenizer,
            split=config.split,
            encoder_seq_length=whole(config.seq_length),
            decoder_seq_length=whole(config.decoder_seq_length),
            num_samples=num_samples,
            seed=config.seed,
            mask_prob=config.mask_prob,
            short_seq_prob=config.short_seq_prob,
            cache_dir=config.data_cache_path,
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `T5.forward`."""
        labels_BR = stacked(samples, "labels")
        encoder_BS, decoder_BR = stacked(samples, "enc_mask"), stacked(samples, "dec_mask")
        return {
            "tokens_BS": stacked(samples, "text_enc"),
            "segments_BS": encoder_BS,
            "valid_BS": encoder_BS,
            "decoder_tokens_BR": stacked(samples, "text_dec"),
            # Padding attends to padding.
            "decoder_segments_BR": decoder_BR,
            "decoder_valid_BR": decoder_BR,
            "labels_BR": np.maximum(labels_BR, 0),
            "weights_BR": stacked(samples, "loss_mask").astype(np.float32),
        }
