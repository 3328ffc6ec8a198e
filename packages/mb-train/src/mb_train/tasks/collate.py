"""What tasks make batches of: samples stacked, their ends, and the places that are not padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from mb_train.tasks.base import Batch, Task

# Samples at a time where no gradient is taken.
EVALUATED_AT_ONCE = 32


def batches_of(
    task: Task, samples: list[Any], model: nn.Module, *, at_once: int = EVALUATED_AT_ONCE
) -> Iterator[tuple[list[Any], Batch]]:
    """Samples, a few at a time, and the batches that they make, where the model is."""
    device = next(model.parameters()).device
    for start in range(0, len(samples), at_once):
        chunk = samples[start : start + at_once]
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
