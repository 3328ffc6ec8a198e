"""A stage as torch's schedules run it."""

# Apart from `stage`, for importing torch's pipelining takes seconds.

from __future__ import annotations

from typing import Any

import torch
from mb_layers.losses import attach_aux_loss
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mb_parallel.pipeline_parallel.stage import Pass, StageOutput


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
