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
from mb_train.models.tensor_plans import classifier_plan
from mb_train.models.workload import Head, Pass, Workload
from mb_train.tasks.base import Borders, DataPaths, Dataset, Datasets, Wanted
from mb_train.tasks.collate import batches_of, kept_places, segment_ends, stacked
from mb_train.tasks.examples import Example, ExampleDataset
from mb_train.tasks.pairs import FORMS, read_pairs
from mb_train.tasks.race import LETTERS, QUESTION_AT_MOST, read_questions
from mb_train.tasks.sentences import SentenceTask


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


class ClassifyTask(SentenceTask):
    """See `base.Task`; a tokenizer with [CLS], [SEP] and [PAD]."""

    def __init__(self, config: TrainConfig, *args: Any, **how: Any) -> None:
        super().__init__(config, *args, **how)
        assert config.task is not None
        self.loss_weights = {LOSS: "weights_A"}
        self._name, self._length = config.task, whole(config.seq_length)
        self._chooses = config.task == "race"
        self._classes = 1 if self._chooses else len(FORMS[self._name].classes)
        texts = len(LETTERS) if self._chooses else 1
        self.workload = Workload(
            (Pass(self.model_config, self._length, sequences=texts),),
            (Head(texts, self.model_config.hidden_size), Head(texts, self._classes)),
        )

    def borders(self, runs: Sequence[range]) -> Borders:
        """Relative positions are every stage's."""
        relative = self.model_config.positions == "relative"
        name = "bert.bias.table.weight"
        return Borders({name: dict.fromkeys(range(1, len(runs)), name)} if relative else {})

    def tensor_plan(self) -> Plan:
        """See `models.tensor_plans`."""
        return classifier_plan(self.model_config)

    def build_model(self, *, compute_dtype: torch.dtype) -> Classifier:
        """A classifier with fresh weights."""
        return Classifier(self.model_config, classes=self._classes, compute_dtype=compute_dtype)

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Files for each part; the training's examples come in another order each time."""
        assert isinstance(paths, Mapping)
        train, valid, test = (
            self._dataset(files, wanted, shuffled=part == "train")
            if files is not None and wanted is not None
            else None
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
            "weights_A": np.array([sample["weight"] for sample in samples], np.float32),
            **(kept_places(kept_T=valid_BS) if self._leave_out else {}),
        }

    @torch.no_grad()
    def evaluate_more(self, model: Classifier, dataset: Dataset, count: int) -> dict[str, float]:
        """`accuracy`, and what always guessing the commonest of these labels would reach."""
        samples = [sample for i in range(count) if (sample := dataset[i])["weight"]]
        right = 0
        for _, batch in batches_of(self, samples, model):
            names = ("tokens_BS", "token_types_BS", "ends_BN", "valid_BS")
            x_BSD, _ = model.bert.encode(*(batch[name] for name in names), batch.get("kept_T"))
            labels_A = batch["labels_A"]
            right += int((model.scores(x_BSD, len(labels_A)).argmax(1) == labels_A).sum())
        commonest = np.bincount([sample["label"] for sample in samples]).max()
        return {
            "accuracy": right / len(samples),
            "most frequent label": float(commonest) / len(samples),
        }
