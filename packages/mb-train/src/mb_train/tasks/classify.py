"""Telling of which class a pair of sentences is (MNLI, QQP), or which answer is right (RACE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
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
from mb_train.tasks.examples import Example, ExampleDataset
from mb_train.tasks.from_bert import trained_bert
from mb_train.tasks.pairs import FORMS, read_pairs
from mb_train.tasks.race import LETTERS, QUESTION_AT_MOST, read_questions


def read_examples(paths: Sequence[str], task: str) -> list[Example]:
    """What the files of a task hold, one behind the other; of RACE they may be folders.

    Raises:
        ValueError: a file that is not of this task, or holds nothing.
        OSError: one that cannot be read.
    """
    if task == "race":
        found = [read_questions(Path(path)) for path in paths]
    else:
        found = [read_pairs(Path(path), task) for path in paths]
    return list(chain.from_iterable(found))


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
    tells_more = True

    def __init__(
        self, config: TrainConfig, tokenizer: Any, *, vocab_size: int, leave_out: bool = False
    ) -> None:
        assert config.task is not None
        self.loss_weights = {LOSS: "weights_A"}
        self._chooses = config.task == "race"
        self._length = whole(config.seq_length)
        self.sequence_length = self._length * (len(LETTERS) if self._chooses else 1)
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
        classes = 1 if self._chooses else len(FORMS[self._name].classes)
        model = Classifier(self.model_config, classes=classes, compute_dtype=compute_dtype)
        if self._config.bert_load is not None:
            model.begin_from(trained_bert(self._config.bert_load, self.model_config))
        return model

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """Files for each part; the training's examples come in another order each time."""
        assert isinstance(paths, Mapping)
        train, valid, test = (
            None if files is None else self._dataset(files, wanted, shuffled=part == "train")
            for (part, files), wanted in zip(paths.items(), num_samples, strict=True)
        )
        return train, valid, test

    def _dataset(self, files: Sequence[str], samples: int, *, shuffled: bool) -> ExampleDataset:
        return ExampleDataset(
            read_examples(files, self._name),
            self._tokenizer,
            seq_length=self._length,
            first_at_most=QUESTION_AT_MOST if self._chooses else None,
            num_samples=samples,
            seed=self._config.seed if shuffled else None,
        )

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """See `Classifier.forward`."""
        tokens_BS, types_BS, valid_BS = (
            stacked(samples, name).reshape(-1, self._length)
            for name in ("text", "types", "padding_mask")
        )
        (ends_BN,) = segment_ends((valid_BS.sum(1, keepdims=True), self._length))
        return {
            "tokens_BS": tokens_BS,
            "token_types_BS": types_BS,
            "ends_BN": ends_BN,
            "valid_BS": valid_BS,
            "labels_A": stacked(samples, "label"),
            "weights_A": np.ones(len(samples), np.float32),
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
            labels_A = batch["labels_A"]
            right += int((model.scores(x_BSD, len(labels_A)).argmax(1) == labels_A).sum())
        commonest = np.bincount([sample["label"] for sample in samples]).max()
        return {"accuracy": right / count, "most frequent label": float(commonest) / count}
