"""What the training loop asks of a task, and nothing more.

A batch is a dictionary of arrays, one row per sequence, named like the arguments of the model that
takes them. Each loss of a task is a weighted sum over terms (tokens, sentences), and the batch
holds the weights: 1 for a term that counts, 0 for padding. The loop divides them by their sum over
the whole step, all micro-batches and ranks, so that a step's loss is the mean over its valid terms
however they are spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from mb_parallel.tensor_parallel import Plan
from torch import Tensor

from mb_train.models.workload import Workload

Batch: TypeAlias = dict[str, Tensor]
DataPaths: TypeAlias = Sequence[str] | Mapping[str, Sequence[str] | None]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Datasets: TypeAlias = tuple[Dataset | None, Dataset | None, Dataset | None]


class Borders(NamedTuple):
    """What the stages of a pipeline have to do with each other; see `mb_parallel.Pipeline`.

    tied: parameters of the first stage of which others have copies; {} if none is tied.
    streams: the entries of a batch that are as long as what crosses each border; None: the first
        input's alone.
    """

    tied: Mapping[str, str | Mapping[int, str]]
    streams: list[list[str]] | None = None


class Task(Protocol):
    """A kind of model and what it learns.

    Attributes:
        first_input: the entry of a batch that the model takes by position.
        loss_weights: for each loss by name, the entry of a batch with the weights of its terms.
        workload: what is computed of a sample; its tokens count for throughput.
        sentences: whether it reads files that were split into sentences.
        tells_more: whether `evaluate_more` finds anything.
    """

    first_input: str
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

    def build_datasets(self, paths: DataPaths, num_samples: tuple[int, int, int]) -> Datasets:
        """Training, validation and test set over token files.

        Args:
            paths: one prefix, or weights and prefixes by turns; or either for each of "train",
                "valid" and "test".
            num_samples: how many samples each must have.
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


# Samples at a time where no gradient is taken.
EVALUATED_AT_ONCE = 32


def batches_of(
    task: Task, samples: list[Any], device: torch.device
) -> Iterator[tuple[list[Any], Batch]]:
    """Samples, a few at a time, and the batches that they make."""
    for start in range(0, len(samples), EVALUATED_AT_ONCE):
        chunk = samples[start : start + EVALUATED_AT_ONCE]
        arrays = {name: np.ascontiguousarray(a) for name, a in task.collate(chunk).items()}
        yield chunk, {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}


def stacked(samples: list[Any], name: str) -> np.ndarray:
    """One entry of all samples, int64 [B, ...]."""
    return np.stack([np.asarray(sample[name], np.int64) for sample in samples])


# Sizes of a batch without its padding: so many steps from nothing to all of it, none smaller than
# matrix products like. What is made for a shape, compiled or captured, is made a few times.
_STEPS, LEAST_STEP = 32, 64


def kept_places(**valid: np.ndarray) -> dict[str, np.ndarray]:
    """The entries of a batch that say which places blocks are to see; none where that is all.

    They are those that are not padding, and padding up to the next size that a batch may have.

    Args:
        valid: by the name of the entry, nonzero for what is not padding, [B, S].
    """
    found = {name: _real_first(valid_BS) for name, valid_BS in valid.items()}
    return {name: kept_T for name, kept_T in found.items() if kept_T is not None}


def _real_first(valid_BS: np.ndarray) -> np.ndarray | None:
    places = valid_BS.size
    step = math.ceil(places / _STEPS / LEAST_STEP) * LEAST_STEP
    size = math.ceil(max(np.count_nonzero(valid_BS), 1) / step) * step
    if size >= places:
        return None
    real_first = np.argsort(valid_BS.ravel() == 0, kind="stable")
    return np.sort(real_first[:size])


def segment_ends(*streams: tuple[np.ndarray, int]) -> list[np.ndarray]:
    """The ends of samples and, last, of the padding, int64 [B, P + 1] for each stream of a batch.

    [B, 1] where no sequence of any stream has padding or a second sample.

    Args:
        streams: tokens of each sample of a sequence, [B, P], and tokens of a sequence.
    """
    divided = any((lengths_BP[:, 0] < size).any() for lengths_BP, size in streams)
    found = []
    for lengths_BP, size in streams:
        whole_B1 = np.full((len(lengths_BP), 1), size)
        behind_BP = np.cumsum(lengths_BP, axis=1)
        found.append(np.concatenate([behind_BP, whole_B1], axis=1) if divided else whole_B1)
    return found
