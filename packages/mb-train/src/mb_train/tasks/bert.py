"""Restoring hidden words, and telling which of two segments comes first: BERT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mb_data
import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.bert import LM_LOSS, ORDER_LOSS, Bert
from mb_train.models.tensor_plans import bert_plan
from mb_train.models.workload import Head, Pass, Workload
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, Wanted
from mb_train.tasks.collate import batches_of, kept_places, segment_ends
from mb_train.tasks.packed import laid, lengths_of, pack, row_of
from mb_train.tasks.sentences import SentenceTask

_TOKENS, _BIAS = "embedding.tokens.weight", "bias.table.weight"
_VALID = "padding_mask"  # of a sample


class BertTask(SentenceTask):
    """See `base.Task`; a tokenizer with [CLS], [SEP], [MASK] and [PAD]."""

    def __init__(self, config: TrainConfig, *args: Any, **how: Any) -> None:
        super().__init__(config, *args, **how)
        model = self.model_config
        self.loss_weights = {LM_LOSS: "weights_BM"}
        if config.bert_binary_head:
            self.loss_weights[ORDER_LOSS] = "order_weights_BP"
        self._length = whole(config.seq_length)
        # No sequence has more: see `mb_data.samples.masking`, which rounds for each sample.
        self._most = config.samples_per_sequence
        rounding = self._most if self._most > 1 else 0
        self._places = max(math.ceil(config.mask_prob * self._length) + rounding, 1)
        heads = [Head(self._places, model.hidden_size), Head(self._places, model.vocab_size)]
        if config.bert_binary_head:
            heads += [Head(self._most, model.hidden_size), Head(self._most, 2)]
        self.workload = Workload((Pass(model, self._length),), tuple(heads))

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
        """See `models.tensor_plans`."""
        return bert_plan(self.model_config)

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Megatron's samples over files that were split into sentences, packed if asked for."""
        build = partial(self._build_datasets, paths)
        return pack(build, num_samples, rooms=[self._length], most=self._most)

    def _build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        config = self._config
        return mb_data.build_bert_datasets(
            paths,
            tokenizer=self._tokenizer,
            seq_length=self._length,
            num_samples=num_samples,
            mask_prob=config.mask_prob,
            short_seq_prob=config.short_seq_prob,
            binary_head=config.bert_binary_head,
            **config.dataset_arguments(),
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `Bert.forward`; places to restore come first in a row, then others, without a label.

        Args:
            samples: for each sequence a sample, or a list of those that it is packed with.
        """
        rows = list(map(row_of, samples))
        lengths_BP = lengths_of(rows, _VALID, self._most)
        (ends_BN,) = segment_ends((lengths_BP, self._length))
        labels_BS = laid(rows, "labels", _VALID)
        places_BM = np.argsort(labels_BS < 0, axis=1, kind="stable")[:, : self._places]
        labels_BM = np.take_along_axis(labels_BS, places_BM, axis=1)
        batch = {
            "tokens_BS": laid(rows, "text", _VALID),
            "token_types_BS": laid(rows, "types", _VALID),
            "ends_BN": ends_BN,
            "valid_BS": laid(rows, _VALID, _VALID),
            "masked_BM": places_BM,
            "labels_BM": labels_BM,
            "weights_BM": (labels_BM >= 0).astype(np.float32),
        }
        if self._leave_out:
            batch |= kept_places(kept_T=batch["valid_BS"])
        if self._config.bert_binary_head:
            there_BP = lengths_BP > 0
            before_BP = np.cumsum(lengths_BP, axis=1) - lengths_BP
            batch["first_BP"] = np.where(there_BP, before_BP, 0)
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
        for _, batch in batches_of(self, samples, model):
            names = ("tokens_BS", "token_types_BS", "ends_BN", "valid_BS")
            x_BSD, _ = model.encode(*(batch[name] for name in names), batch.get("kept_T"))
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
