"""What a stage module returns, and what is recorded while a step's micro-batches pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]


class StageOutput(Protocol):
    """What a stage module returns; any object with these attributes will do.

    x: hidden states for the next stage, a floating-point tensor, or a tuple of several streams (a
        decoder's and the encoder's). Not read on the last stage.
    losses: scalars by name, on the last stage. Their sums over micro-batches are the step's.
    aux_loss: scalar, or None. The sum over stages is the model's auxiliary loss, the mean over all
        of its MoE layers.
    metrics: detached tensors [l, ...], a row for each of this stage's l MoE layers; or {}. They are
        copied, so the stage may write them again in the next micro-batch.

    Losses and metrics have the same names, shapes and dtypes in every micro-batch.
    """

    @property
    def x(self) -> Tensor | tuple[Tensor, ...] | None: ...
    @property
    def losses(self) -> Mapping[str, Tensor]: ...
    @property
    def aux_loss(self) -> Tensor | None: ...
    @property
    def metrics(self) -> Mapping[str, Tensor]: ...


@dataclass
class Pass:
    """One pass of a step's micro-batches through the stages of this rank, and what they reported.

    passes: the number of micro-batches of all data-parallel ranks in the step. Auxiliary losses are
        averaged over them.
    reported: by stage and kind, "loss" or "metric", those of each micro-batch by name, in order.
    """

    batches: Sequence[Batch]
    first_input: str
    passes: int
    loss_scale: Tensor | float
    before: Callable[[int], None]
    reported: defaultdict[tuple[int, str], list[Mapping[str, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
