"""Predicting the next token: GPT on packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mb_data
import numpy as np
import torch
from mb_layers import MoEConfig

from mb_train.config import TrainConfig, whole
from mb_train.models.config import TransformerConfig
from mb_train.models.gpt import GPT
from mb_train.models.transformer import output_std
from mb_train.tasks.base import Datasets


class GPTTask:
    """See `base.Task`.

    Args:
        config: the run.
        vocab_size: padded.
        eod: the end-of-document token.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    first_input = "tokens_BS"

    def __init__(self, config: TrainConfig, *, vocab_size: int, eod: int) -> None:
        self.loss_weights = {"lm loss": "weights_BS"}
        self.sequence_length = whole(config.seq_length)
        self.model_config = transformer_config(config, vocab_size)
        self._config, self._eod = config, eod

    def build_model(self, *, compute_dtype: torch.dtype) -> GPT:
        """A GPT with fresh weights."""
        model = GPT(self.model_config, compute_dtype=compute_dtype)
        model.stack.recompute = self._config.recompute_granularity == "full"
        return model

    def build_datasets(self, paths: Sequence[str], num_samples: tuple[int, int, int]) -> Datasets:
        """Megatron's packing: samples of S + 1 tokens, neighbours share one."""
        config = self._config
        return mb_data.build_gpt_datasets(
            paths[0] if len(paths) == 1 else list(paths),
            split=config.split,
            seq_length=self.sequence_length,
            num_samples=num_samples,
            seed=config.seed,
            cache_dir=config.data_cache_path,
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """tokens_BS and labels_BS, one place apart, and weights_BS."""
        text = np.stack([np.asarray(sample) for sample in samples]).astype(np.int64)
        tokens_BS, labels_BS = text[:, :-1], text[:, 1:]
        weights_BS = np.ones(tokens_BS.shape, np.float32)
        return {"tokens_BS": tokens_BS, "labels_BS": labels_BS, "weights_BS": weights_BS}


def transformer_config(config: TrainConfig, vocab_size: int) -> TransformerConfig:
    """The model of a run.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """
    residual_std = output_std(config.init_method_std, whole(config.num_layers))
    return TransformerConfig(
        num_layers=whole(config.num_layers),
        hidden_size=whole(config.hidden_size),
        ffn_size=config.ffn_size,
        vocab_size=vocab_size,
        num_heads=whole(config.num_attention_heads),
        num_kv_heads=whole(config.num_attention_heads),
        head_size=config.head_size,
        max_positions=config.positions,
        activation=config.activation_name,
        norm_eps=config.layernorm_epsilon,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        init_std=config.init_method_std,
        output_init_std=residual_std,
        moe=moe_config(config, residual_std),
    )


def moe_config(config: TrainConfig, output_init_std: float) -> MoEConfig | None:
    """The experts of a run; None for a dense model."""
    if config.moe_num_experts is None:
        return None
    return MoEConfig(
        hidden_size=whole(config.hidden_size),
        ffn_hidden_size=config.expert_ffn_size,
        activation=config.activation_name,
        init_method_std=config.init_method_std,
        output_init_std=output_init_std,
        **config.moe_arguments(),
    )
