"""What the training loop asks of a task, and nothing more.

A batch is a dictionary of arrays, one row per sequence, named like the arguments of the model that
takes them. Each loss of a task is a weighted sum over terms (tokens, sentences), and the batch
holds the weights: 1 for a term that counts, 0 for padding. The loop divides them by their sum over
the whole step, all micro-batches and ranks, so that a step's loss is the mean over its valid terms
however they are spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan
from torch import Tensor

from mb_train.models.workload import Workload

Batch: TypeAlias = dict[str, Tensor]
# The entry of a batch that every model takes by position.
FIRST_INPUT = "tokens_BS"
DataPaths: TypeAlias = Sequence[str] | Mapping[str, Sequence[str] | None]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


# Samples for training, validation and test; None for a set that is not.
Wanted: TypeAlias = Sequence[int | None]
Datasets: TypeAlias = tuple[Dataset | None, Dataset | None, Dataset | None]


class Borders(NamedTuple):
    """How the stages of a pipeline depend on each other; see `mb_parallel.pipeline_parallel`.

    tied: parameters of the first stage of which others have copies; {} if none is tied.
    streams: the entries of a batch that are as long as what crosses each border; None: the first
        input's alone.
    """

    tied: Mapping[str, str | Mapping[int, str]]
    streams: list[list[str]] | None = None


class Task(Protocol):
    """A kind of model and what it learns.

    Attributes:
        loss_weights: for each loss by name, the entry of a batch with the weights of its terms.
        workload: what is computed of a sample; its tokens count for throughput.
        sentences: whether it reads files that were split into sentences.
        tells_more: whether `evaluate_more` finds anything.
    """

    loss_weights: dict[str, str]
    workload: Workload
    sentences: bool
    tells_more: bool

    def borders(self, runs: Sequence[range]) -> Borders:
        """Of a pipeline with these runs of layers as its stages.

        Raises:
            ValueError: the model cannot be a pipeline.
        """
        ...

    def build_model(self, *, compute_dtype: torch.dtype) -> Any:
        """A model with fresh weights on the current default device.

        An `nn.Module` with `keep(layers, first=..., last=...)` if it can be a pipeline.
        """
        ...

    def tensor_plan(self) -> Plan:
        """What tensor parallelism makes of its modules.

        Raises:
            ValueError: the model has something that cannot be shared out.
        """
        ...

    def build_datasets(self, paths: DataPaths, num_samples: Wanted) -> Datasets:
        """Training, validation and test set over token files.

        Args:
            paths: prefixes, or weights and prefixes by turns; or either for each of "train",
                "valid" and "test".
            num_samples: how many samples each must have; None for a set that is not wanted.
        """
        ...

    def collate(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """A batch from samples; arrays may be of any integer type, weights are fp32."""
        ...

    def evaluate_more(self, model: Any, dataset: Dataset, count: int) -> dict[str, float]:
        """What a user wants to know of a trained model beside its losses; {} for none.

        Args:
            model: whole, in eval mode.
            dataset: of this task's; its first `count` samples are looked at.
        """
        ...
