"""Telling of which class a pair of sentences is: MNLI, QQP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan

from mb_train.config import TrainConfig, whole
from mb_train.models.classifier import LOSS, Classifier
from mb_train.models.plans import classifier_plan
from mb_train.tasks.architecture import transformer_config
from mb_train.tasks.base import (
    Borders,
    DataPaths,
    Dataset,
    Datasets,
    batches_of,
    kept_places,
    segment_ends,
    stacked,
)
from mb_train.tasks.from_bert import trained_bert
from mb_train.tasks.pairs import FORMS, PairDataset, read_pairs


class ClassifyTask:
    """See `base.Task`.

    Args:
        config: the run.
        tokenizer: with [CLS], [SEP] and [PAD].
        vocab_size: padded.
        leave_out: batches say which places are padding, for blocks to leave out.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """

    first_input = "tokens_BS"
    sentences = True

    def __init__(
        self, config: TrainConfig, tokenizer: Any, *, vocab_size: int, leave_out: bool = False
    ) -> None:
        assert config.task is not None
        self.loss_weights = {LOSS: "weights_B"}
        self.sequence_length = whole(config.seq_length)
        self.model_config = transformer_config(config, vocab_size)
        self.layers = self.model_config.num_layers
        self._config, self._tokenizer, self._name = config, tokenizer, config.task
        self._leave_out = leave_out

    def borders(self, runs: Sequence[range]) -> Borders:
        """Relative positions are every stage's."""
        relative = self.model_config.positions == "relative"
        name = "bert.bias.table.weight"
        return Borders({name: dict.fromkeys(range(1, len(runs)), name)} if relative else {})

    def tensor_plan(self) -> Plan:
        """See `models.plans`."""
        return classifier_plan(self.model_config)

    def build_model(self, *, compute_dtype: torch.dtype) -> Classifier:
        """A classifier with fresh weights, or on a trained BERT."""
        classes = len(FORMS[self._name].classes)
        model = Classifier(self.model_config, classes=classes, compute_dtype=compute_dtype)
        if self._config.bert_load is not None:
            model.begin_from(trained_bert(self._config.bert_load, self.model_config))
        return model

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """A TSV file for each part; the training's pairs come in another order each time."""
        assert isinstance(paths, Mapping)
        train, valid, test = (
            None if files is None else self._dataset(files[0], wanted, shuffled=part == "train")
            for (part, files), wanted in zip(paths.items(), num_samples, strict=True)
        )
        return train, valid, test

    def _dataset(self, file: str, samples: int, *, shuffled: bool) -> PairDataset:
        return PairDataset(
            read_pairs(Path(file), self._name),
            self._tokenizer,
            seq_length=self.sequence_length,
            num_samples=samples,
            seed=self._config.seed if shuffled else None,
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `Classifier.forward`."""
        valid_BS = stacked(samples, "padding_mask")
        (ends_BN,) = segment_ends((valid_BS.sum(1, keepdims=True), self.sequence_length))
        return {
            "tokens_BS": stacked(samples, "text"),
            "token_types_BS": stacked(samples, "types"),
            "ends_BN": ends_BN,
            "valid_BS": valid_BS,
            "labels_B": stacked(samples, "label"),
            "weights_B": np.ones(len(samples), np.float32),
            **(kept_places(kept_T=valid_BS) if self._leave_out else {}),
        }

    @torch.no_grad()
    def evaluate_more(self, model: Classifier, dataset: Dataset, count: int) -> dict[str, float]:
        """`accuracy`, and what always guessing the commonest of these labels would reach."""
        samples = [dataset[i] for i in range(count)]
        right, device = 0, next(model.parameters()).device
        for _, batch in batches_of(self, samples, device):
            names = ("tokens_BS", "token_types_BS", "ends_BN", "valid_BS")
            x_BSD, _ = model.bert.encode(*(batch[name] for name in names), batch.get("kept_T"))
            scores_BC = model.scores(x_BSD)
            right += int((scores_BC.argmax(1) == batch["labels_B"]).sum())
        commonest = np.bincount([sample["label"] for sample in samples]).max()
        return {"accuracy": right / count, "most frequent label": float(commonest) / count}
