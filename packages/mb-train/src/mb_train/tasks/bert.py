"""Restoring hidden words, and telling which of two segments comes first: BERT."""

from __future__ import annotations

import math
from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.bert import LM_LOSS, ORDER_LOSS, Bert
from mb_train.models.plans import bert_plan
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import DataPaths, Dataset, Datasets, batches_of


class BertTask:
    """See `base.Task`.

    Args:
        config: the run.
        tokenizer: with [CLS], [SEP], [MASK] and [PAD].
        vocab_size: padded.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    first_input = "tokens_BS"
    sentences = True

    def __init__(self, config: TrainConfig, tokenizer: Any, *, vocab_size: int) -> None:
        self.loss_weights = {LM_LOSS: "weights_BM"}
        if config.bert_binary_head:
            self.loss_weights[ORDER_LOSS] = "order_weights_B"
        self.sequence_length = whole(config.seq_length)
        self.model_config = transformer_config(config, vocab_size)
        tokens = "embedding.tokens.weight"
        self.tied_parameters = {tokens: tokens}
        self._config, self._tokenizer = config, tokenizer
        # No sample has more: see `mb_data.masking`.
        self._places = max(math.ceil(config.mask_prob * self.sequence_length), 1)

    def build_model(self, *, compute_dtype: torch.dtype) -> Bert:
        """A BERT with fresh weights."""
        return Bert(
            self.model_config,
            binary_head=self._config.bert_binary_head,
            compute_dtype=compute_dtype,
        )

    def tensor_plan(self) -> Plan:
        """See `models.plans`."""
        return bert_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """Megatron's samples over files that were split into sentences."""
        config = self._config
        return mb_data.build_bert_datasets(
            paths,
            tokenizer=self._tokenizer,
            split=config.split,
            split_rounding=config.split_rounding,
            seq_length=self.sequence_length,
            num_samples=num_samples,
            seed=config.seed,
            mask_prob=config.mask_prob,
            short_seq_prob=config.short_seq_prob,
            binary_head=config.bert_binary_head,
            cache_dir=config.data_cache_path,
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `Bert.forward`; places to restore come first in a row, then others of weight 0."""
        labels_BS = stacked(samples, "labels")
        places_BM = np.argsort(labels_BS < 0, axis=1, kind="stable")[:, : self._places]
        labels_BM = np.take_along_axis(labels_BS, places_BM, axis=1)
        valid_BS = stacked(samples, "padding_mask")
        batch = {
            "tokens_BS": stacked(samples, "text"),
            "token_types_BS": stacked(samples, "types"),
            "segments_BS": valid_BS,
            "valid_BS": valid_BS,
            "masked_BM": places_BM,
            "labels_BM": np.maximum(labels_BM, 0),
            "weights_BM": (labels_BM >= 0).astype(np.float32),
        }
        if self._config.bert_binary_head:
            batch["order_B"] = np.array([s["is_random"] for s in samples], np.int64)
            batch["order_weights_B"] = np.ones(len(samples), np.float32)
        return batch

    @torch.no_grad()
    def evaluate_more(self, model: Bert, dataset: Dataset, count: int) -> dict[str, float]:
        """`masked accuracy`: share of hidden tokens that are the model's first choice.

        `most frequent token`: what always guessing the commonest of these labels would reach;
        `order accuracy`: share of samples whose order is told.
        """
        samples = [dataset[i] for i in range(count)]
        right, in_order, labels = 0.0, 0.0, []
        device = next(model.parameters()).device
        for _, batch in batches_of(self, samples, device):
            names = ("tokens_BS", "token_types_BS", "segments_BS", "valid_BS")
            x_BSD, _ = model.encode(*(batch[name] for name in names))
            found_BM = model.logits(x_BSD, batch["masked_BM"]).argmax(2)
            counts_BM = batch["weights_BM"] > 0
            right += float(((found_BM == batch["labels_BM"]) & counts_BM).sum())
            labels.append(batch["labels_BM"][counts_BM])
            if model.order_head is not None and model.pooler is not None:
                told_B = model.order_head(model.pooler(x_BSD)).argmax(1)
                in_order += float((told_B == batch["order_B"]).sum())
        every = torch.cat(labels)
        if not len(every):
            return {}
        commonest = float(every.unique(return_counts=True)[1].max())
        found = {
            "masked accuracy": right / len(every),
            "most frequent token": commonest / len(every),
        }
        if model.order_head is not None:
            found["order accuracy"] = in_order / len(samples)
        return found


def stacked(samples: list[Any], name: str) -> np.ndarray:
    """One entry of all samples, int64 [B, ...]."""
    return np.stack([np.asarray(sample[name], np.int64) for sample in samples])
