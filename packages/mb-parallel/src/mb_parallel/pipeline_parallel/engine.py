"""A stage as torch's schedules run it."""

# Not in `stage`, because importing torch's pipelining takes seconds.

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from mb_layers.losses import attach_aux_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from mb_parallel.expert_parallel.counts import step_counts
from mb_parallel.pipeline_parallel.halves import must_stay_whole
from mb_parallel.pipeline_parallel.stage import Pass, StageOutput


class Stage(PipelineStage):
    """A stage module on this rank.

    Only hidden states are sent between stages, in one stream or several. All stages of a
    data-parallel rank have the micro-batches themselves, so torch's schedule passes only a
    micro-batch's number.

    Args:
        input_args, output_args: examples: of that number or the streams from the stage before; of
            the streams for the next stage or the loss.
        in_halves: the schedule computes gradients of inputs and of weights separately.
    """

    passing: Pass
    number: int

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: tuple[Tensor, ...],
        output_args: tuple[Tensor, ...],
        group: dist.ProcessGroup,
        in_halves: bool,
    ) -> None:
        super().__init__(module, index, num_stages, device, input_args, output_args, group=group)
        self.in_halves = in_halves
        self.leaving = () if self.is_last else output_args
        self.counts = step_counts(module)
        # Keeps a micro-batch's graph alive between the halves of its backward pass. Torch keeps
        # the nodes where the second half begins. But the Python object of an `autograd.Function`'s
        # node does not own the node (before torch 2.13), which is freed with its graph. The node
        # of a view does own what is behind it, so one of these is kept.
        self.graphs: dict[int, list[Any]] = {}
        # Micro-batches whose backward pass is left whole, since torch's halves would be wrong.
        self.whole: set[int] = set()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See the base class; notes the number of the micro-batch."""
        self.number = fwd_chunk_id
        for counts in self.counts:
            counts.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; returns the tensors for the next stage or, on the last, the loss."""
        passing = self.passing
        passing.before(self.number + self.stage_index * len(passing.batches))
        batch = passing.batches[self.number]
        rest = {name: value for name, value in batch.items() if name != passing.first_input}
        received = args[0] if len(args) == 1 else args
        x = batch[passing.first_input] if self.is_first else received
        output: StageOutput = super().forward_maybe_with_nosync(x, **rest)
        passing.reported[self.stage_index, "metric"].append(_kept(output.metrics))
        if self.is_last:
            passing.reported[self.stage_index, "loss"].append(_kept(output.losses))
            total = self._total(output)
            self._hold([total], args)
            return total
        first, *others = self._checked(output.x)
        if not torch.is_grad_enabled():
            return output.x
        if output.aux_loss is not None:
            first = attach_aux_loss(first, output.aux_loss, passing.loss_scale / passing.passes)
        streams = tuple(self._own(stream) for stream in (first, *others))
        self._hold(streams, args)
        return streams[0] if len(streams) == 1 else streams

    def _checked(self, x: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The streams for the next stage, which would take others for what it awaits."""
        streams = x if isinstance(x, tuple) else () if x is None else (x,)
        awaited, got = ([(x.shape, x.dtype) for x in of] for of in (self.leaving, streams))
        if awaited != got:
            wanted, found = (
                ", ".join(f"{list(shape)} in {dtype}" for shape, dtype in of)
                for of in (awaited, got)
            )
            raise ValueError(
                f"Expected stage {self.stage_index} to return x {wanted}, by the pipeline's "
                f"hidden_size, dtype and streams, got {found or 'none'}."
            )
        return streams

    def _hold(self, outputs: Iterable[Tensor], received: Iterable[Tensor]) -> None:
        if self.in_halves and torch.is_grad_enabled():
            nodes: list[Any] = [x.view_as(x).grad_fn for x in outputs]
            self.graphs[self.number] = nodes
            whole = must_stay_whole(nodes, received)
            (self.whole.add if whole else self.whole.discard)(self.number)

    def _own(self, stream: Tensor) -> Tensor:
        """A stream as the schedule needs it: no view if it will be detached."""
        # A zero-bubble schedule detaches outputs in place after half of their backward pass.
        return stream.clone() if self.in_halves and stream._is_view() else stream

    # What is recomputed in a backward pass belongs to its micro-batch, not to the latest forward's.

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """See the base class; nothing is left for a second half of a pass that is left whole."""
        full_backward = full_backward or self._left_whole(bwd_chunk_id)
        self._resume(bwd_chunk_id)
        if full_backward:
            self.graphs.pop(bwd_chunk_id, None)
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See the base class."""
        if self._left_whole(bwd_chunk_id):
            return None
        self._resume(bwd_chunk_id)
        done = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.graphs.pop(bwd_chunk_id, None)
        return done

    def _left_whole(self, number: int) -> bool:
        """Whether a micro-batch's backward pass is not taken apart, also if the schedule would.

        Nor is that of the only one. Halves would fill no idle time there, and leave FSDP2 gradients
        of two dtypes in 16 bit: those of the second half come behind its hooks, which only another
        micro-batch sets off.
        """
        return len(self.passing.batches) == 1 or number in self.whole

    def _resume(self, number: int) -> None:
        for counts in self.counts:
            counts.resume(number)

    # Torch (2.13) forgets the gradients of what FSDP2 shards whenever a schedule is new, those of
    # earlier steps too, in case it ran the module to learn sizes. It has them from the pipeline.

    def _post_metadata_inference_cleanup(self) -> None:
        """See the base class; nothing, since nothing ran."""

    # Torch passes gradients between the two stages of a V's rank in evaluation too, and fails.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """See the base class; nothing without a backward pass."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """See the base class; nothing without a backward pass."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """See the base class; without those from a rank to itself (in a V), which gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def _total(self, output: StageOutput) -> Tensor:
        """What to call backward on, [1]."""
        if not output.losses:
            raise ValueError("Expected the last stage to return losses by name, got none.")
        total = torch.stack([loss.reshape(()) for loss in output.losses.values()]).sum()
        if output.aux_loss is not None:
            total = total + output.aux_loss / self.passing.passes
        return total.reshape(1) * self.passing.loss_scale


def _kept(reported: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies: the next micro-batch may write into these, such as a counter or a graph's output."""
    return {name: value.detach().clone() for name, value in reported.items()}
