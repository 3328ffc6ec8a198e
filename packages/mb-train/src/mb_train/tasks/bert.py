"""Restoring hidden words, and telling which of two segments comes first: BERT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.bert import LM_LOSS, ORDER_LOSS, Bert
from mb_train.models.plans import bert_plan
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, batches_of
from mb_train.tasks.packed import PackedSamples, bert_lengths, more_samples

_TOKENS, _BIAS = "embedding.tokens.weight", "bias.table.weight"


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
            self.loss_weights[ORDER_LOSS] = "order_weights_BP"
        self.sequence_length = whole(config.seq_length)
        self.model_config = transformer_config(config, vocab_size)
        self.layers = self.model_config.num_layers
        self._config, self._tokenizer = config, tokenizer
        # No sequence has more: see `mb_data.masking`, which rounds for each sample.
        self._most = config.samples_per_sequence
        rounding = self._most if self._most > 1 else 0
        self._places = max(math.ceil(config.mask_prob * self.sequence_length) + rounding, 1)

    def build_model(self, *, compute_dtype: torch.dtype) -> Bert:
        """A BERT with fresh weights."""
        return Bert(
            self.model_config,
            binary_head=self._config.bert_binary_head,
            compute_dtype=compute_dtype,
        )

    def borders(self, runs: Sequence[range]) -> Borders:
        """The head has a copy of the embedding, every stage one of the relative positions."""
        tied: dict[str, Mapping[int, str]] = {_TOKENS: {-1: _TOKENS}}
        if self.model_config.positions == "relative":
            tied[_BIAS] = dict.fromkeys(range(1, len(runs)), _BIAS)
        return Borders(tied)

    def tensor_plan(self) -> Plan:
        """See `models.plans`."""
        return bert_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """Megatron's samples over files that were split into sentences, packed if asked for."""
        found = self._build_datasets(paths, num_samples)
        if self._most == 1:
            return found
        wanted = list(num_samples)
        while True:
            train, valid, test = (None if part is None else self._packed(part) for part in found)
            counts = [math.inf if part is None else len(part) for part in (train, valid, test)]
            few = [part for part in range(3) if counts[part] < num_samples[part]]
            if not few:
                return train, valid, test
            for part in few:
                wanted[part] = more_samples(wanted[part], int(counts[part]), num_samples[part])
            found = self._build_datasets(paths, wanted)

    def _build_datasets(self, paths: DataPaths, num_samples: Sequence[int]) -> Datasets:
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

    def _packed(self, dataset: Dataset) -> PackedSamples:
        room = self.sequence_length
        return PackedSamples(dataset, bert_lengths(dataset), room=room, most=self._most)

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `Bert.forward`; places to restore come first in a row, then others of weight 0.

        Args:
            samples: for each sequence a sample, or a list of those that it is packed with.
        """
        rows = [sample if isinstance(sample, list) else [sample] for sample in samples]
        lengths_BP = np.zeros((len(rows), self._most), np.int64)
        for lengths_P, row in zip(lengths_BP, rows, strict=True):
            lengths_P[: len(row)] = [np.sum(sample["padding_mask"]) for sample in row]
        behind_BP = np.cumsum(lengths_BP, axis=1)

        def laid(name: str) -> np.ndarray:
            return np.stack([_in_a_row(row, name, self.sequence_length) for row in rows])

        labels_BS, valid_BS = laid("labels"), laid("padding_mask")
        places_BM = np.argsort(labels_BS < 0, axis=1, kind="stable")[:, : self._places]
        labels_BM = np.take_along_axis(labels_BS, places_BM, axis=1)
        whole_B1 = np.full((len(rows), 1), self.sequence_length)
        divided = (lengths_BP[:, :1] < whole_B1).any()
        batch = {
            "tokens_BS": laid("text"),
            "token_types_BS": laid("types"),
            "ends_BN": np.concatenate([behind_BP, whole_B1], axis=1) if divided else whole_B1,
            "valid_BS": valid_BS,
            "masked_BM": places_BM,
            "labels_BM": np.maximum(labels_BM, 0),
            "weights_BM": (labels_BM >= 0).astype(np.float32),
        }
        if self._config.bert_binary_head:
            there_BP = lengths_BP > 0
            batch["first_BP"] = np.where(there_BP, behind_BP - lengths_BP, 0)
            order_BP = np.zeros_like(lengths_BP)
            order_BP[there_BP] = [sample["is_random"] for row in rows for sample in row]
            batch["order_BP"] = order_BP
            batch["order_weights_BP"] = there_BP.astype(np.float32)
        return batch

    @torch.no_grad()
    def evaluate_more(self, model: Bert, dataset: Dataset, count: int) -> dict[str, float]:
        """`masked accuracy`: share of hidden tokens that are the model's first choice.

        `most frequent token`: what always guessing the commonest of these labels would reach;
        `order accuracy`: share of samples whose order is told.
        """
        samples = [dataset[i] for i in range(count)]
        right, in_order, ordered, labels = 0.0, 0.0, 0.0, []
        device = next(model.parameters()).device
        for _, batch in batches_of(self, samples, device):
            names = ("tokens_BS", "token_types_BS", "ends_BN", "valid_BS")
            x_BSD, _ = model.encode(*(batch[name] for name in names))
            found_BM = model.logits(x_BSD, batch["masked_BM"]).argmax(2)
            counts_BM = batch["weights_BM"] > 0
            right += float(((found_BM == batch["labels_BM"]) & counts_BM).sum())
            labels.append(batch["labels_BM"][counts_BM])
            if model.order_head is not None:
                told_BP = model.order(x_BSD, batch["first_BP"]).argmax(2) == batch["order_BP"]
                in_order += float((told_BP * batch["order_weights_BP"]).sum())
                ordered += float(batch["order_weights_BP"].sum())
        every = torch.cat(labels)
        if not len(every):
            return {}
        commonest = float(every.unique(return_counts=True)[1].max())
        found = {
            "masked accuracy": right / len(every),
            "most frequent token": commonest / len(every),
        }
        if model.order_head is not None:
            found["order accuracy"] = in_order / max(ordered, 1.0)
        return found


def _in_a_row(samples: list[Any], name: str, length: int) -> np.ndarray:
    """One entry of samples, each without its padding but the last, int64 [length]."""
    parts = [sample[name][: np.sum(sample["padding_mask"])] for sample in samples[:-1]]
    return np.concatenate([*parts, samples[-1][name]])[:length].astype(np.int64)
