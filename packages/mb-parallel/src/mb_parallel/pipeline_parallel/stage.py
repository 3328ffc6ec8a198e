"""One stage of a pipeline as torch's schedules run it, and what a stage module has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from mb_layers.losses import attach_aux_loss
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

Batch = Mapping[str, Tensor]


class StageOutput(Protocol):
    """What a stage module returns; any object with these attributes will do.

    x: hidden states for the next stage, a floating-point tensor; not read on the last stage.
    losses: scalars by name on the last stage, which add up over micro-batches to those of the step.
    aux_loss: scalar, this stage's share of the model's auxiliary loss, the shares adding up over
        stages to the mean over all its MoE layers; or None.
    metrics: detached tensors [l, ...], a row for each of this stage's l MoE layers; or {}.
    """

    @property
    def x(self) -> Tensor | None: ...
    @property
    def losses(self) -> Mapping[str, Tensor]: ...
    @property
    def aux_loss(self) -> Tensor | None: ...
    @property
    def metrics(self) -> Mapping[str, Tensor]: ...


@dataclass
class Pass:
    """One trip of a step's micro-batches through the stages of this rank, and what they said.

    losses, metrics: by stage, a value for each micro-batch, in their order.
    """

    batches: Sequence[Batch]
    first_input: str
    loss_scale: Tensor | float
    before: Callable[[int], None]
    losses: dict[int, list[Mapping[str, Tensor]]] = field(default_factory=dict)
    metrics: dict[int, list[Mapping[str, Tensor]]] = field(default_factory=dict)


class Stage(PipelineStage):
    """A stage module on this rank.

    What travels between stages is one tensor. The micro-batch itself is known to all stages of a
    data-parallel rank, so nothing of it is sent: torch's schedule passes its number alone.
    """

    passing: Pass
    number: int
    in_halves: bool

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See the base class; notes which micro-batch it is."""
        self.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module, and make of its output the one tensor that goes on."""
        passing, batches = self.passing, len(self.passing.batches)
        passing.before(self.number + self.stage_index * batches)
        batch = passing.batches[self.number]
        rest = {name: value for name, value in batch.items() if name != passing.first_input}
        x = batch[passing.first_input] if self.is_first else args[0]
        output: StageOutput = super().forward_maybe_with_nosync(x, **rest)
        passing.metrics.setdefault(self.stage_index, []).append(output.metrics)
        if self.is_last:
            detached = {name: value.detach() for name, value in output.losses.items()}
            passing.losses.setdefault(self.stage_index, []).append(detached)
            return self._total(output)
        x = output.x
        assert x is not None
        if not torch.is_grad_enabled():
            return x
        if output.aux_loss is not None:
            x = attach_aux_loss(x, output.aux_loss, passing.loss_scale / batches)
        # A zero-bubble schedule detaches outputs in place after half of their backward pass.
        return x.clone() if self.in_halves and x._is_view() else x

    # Torch hands gradients over between the two stages of a V's rank in evaluation too, and fails.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """See the base class; nothing without a backward pass."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """See the base class; nothing without a backward pass."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _total(self, output: StageOutput) -> Tensor:
        """What to call backward on, [1]."""
        total = torch.stack([loss.reshape(()) for loss in output.losses.values()]).sum()
        if output.aux_loss is not None:
            total = total + output.aux_loss / len(self.passing.batches)
        return total.reshape(1) * self.passing.loss_scale
