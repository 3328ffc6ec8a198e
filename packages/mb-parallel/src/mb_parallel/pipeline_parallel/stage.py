"""What a stage module has to return, and what is kept of a step's pass through the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]


class StageOutput(Protocol):
    """What a stage module returns; any object with these attributes will do.

    x: hidden states for the next stage, a floating-point tensor, or a tuple of several streams of
        them (a decoder's and the encoder's); not read on the last stage.
    losses: scalars by name on the last stage, which add up over micro-batches to those of the step.
    aux_loss: scalar, this stage's share of the model's auxiliary loss, the shares adding up over
        stages to the mean over all its MoE layers; or None.
    metrics: detached tensors [l, ...], a row for each of this stage's l MoE layers; or {}.

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

    passes: micro-batches of all data-parallel ranks in the step, over which auxiliary losses are
        averaged.
    losses, metrics: by stage, a value for each micro-batch, in their order.
    """

    batches: Sequence[Batch]
    first_input: str
    passes: int
    loss_scale: Tensor | float
    before: Callable[[int], None]
    losses: dict[int, list[Mapping[str, Tensor]]] = field(default_factory=dict)
    metrics: dict[int, list[Mapping[str, Tensor]]] = field(default_factory=dict)
