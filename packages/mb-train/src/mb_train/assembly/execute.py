"""Running a model over micro-batches: one after the other, or down a pipeline.

All executors answer the same two questions, so the loop does not know which it has: what a step's
losses are, after its gradients have been added up, and what a batch's losses are in evaluation.

Before a step its batches get their weights (see `tasks.base`): each rank's loss is then its share
of the global mean, and the gradients of the ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from mb_parallel import ParallelMesh, set_gradient_sync, within_budget
from mb_parallel.expert_parallel import step_counts
from mb_parallel.pipeline_parallel import Pipeline
from torch import Tensor, nn

from mb_train.models.output import ModelOutput
from mb_train.tasks import Batch, Task
from mb_train.tasks.base import FIRST_INPUT

Losses = dict[str, Tensor]


class Work(NamedTuple):
    """What an executor does in a step.

    batches: the micro-batches of this data-parallel rank, weighted.
    loss_scale: multiplies the loss before its backward pass (fp16).
    before: called with the number of each micro-batch before it runs.
    measured: called with the metrics of each forward pass.
    """

    batches: Sequence[Batch]
    loss_scale: Tensor | float
    before: Callable[[int], None]
    measured: Callable[[dict[str, Tensor]], None]


class Executor(Protocol):
    """Runs a model forward and backward."""

    def step(self, work: Work) -> Losses:
        """Add a step's gradients to the parameters'.

        Returns:
            This data-parallel rank's losses by name, detached, without the auxiliary one.
        """
        ...

    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The weighted sums of the batches' losses."""
        ...


class WithinBudget:
    """Runs a step of another executor again where a rank's experts got more rows than budgeted.

    Nothing of the first time remains: gradients begin anew, `before` seeds the random numbers of
    each micro-batch as it did, and what was measured is told once.

    Args:
        inner: runs the step.
        parts: the stages on this rank, without gradients when a step begins.
        device: this rank's.
    """

    def __init__(self, inner: Executor, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._inner, self._parts, self._device = inner, parts, device
        self.steps_redone = 0

    def step(self, work: Work) -> Losses:
        """See `Executor.step`."""
        metrics: list[dict[str, Tensor]] = []

        def attempt() -> Losses:
            metrics.clear()
            return self._inner.step(work._replace(measured=metrics.append))

        losses, again = within_budget(self._parts, attempt, self._device)
        self.steps_redone += again
        for of_pass in metrics:
            work.measured(of_pass)
        return losses

    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """See `Executor.evaluate`."""
        return self._inner.evaluate(batches)


class Sequential:
    """Micro-batches one after the other through a whole model; gradients accumulate.

    Args:
        model: called as `model(batch[FIRST_INPUT], **the rest)`, returns a `ModelOutput`.
        dp_size: data-parallel ranks; auxiliary losses are averaged over the passes of all.
    """

    def __init__(self, model: nn.Module, *, dp_size: int = 1) -> None:
        self._model, self._dp_size = model, dp_size
        self._counts = step_counts(model)  # looking through the model takes 0.4 ms for 12 layers

    def step(self, work: Work) -> Losses:
        """See `Executor.step`."""
        totals: Losses = {}
        count = len(work.batches)
        passes = count * self._dp_size
        for index, batch in enumerate(work.batches):
            work.before(index)
            set_gradient_sync(self._model, index == count - 1)
            for counts in self._counts:
                counts.begin(index)
            output = self._call(batch)
            aux_loss = None if output.aux_loss is None else output.aux_loss / passes
            backward(output.losses, aux_loss, work.loss_scale)
            add_losses(totals, output.losses)
            work.measured(output.metrics)
        return totals

    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """See `Executor.evaluate`."""
        totals: Losses = {}
        for batch in batches:
            add_losses(totals, self._call(batch).losses)
        return totals

    def _call(self, batch: Batch) -> ModelOutput:
        rest = {name: value for name, value in batch.items() if name != FIRST_INPUT}
        return self._model(batch[FIRST_INPUT], **rest)


class Piped:
    """Micro-batches down a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def step(self, work: Work) -> Losses:
        """See `Executor.step`."""
        return self._pipeline.step(**work._asdict())

    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """See `Executor.evaluate`."""
        return self._pipeline.evaluate(batches)


def weigh(task: Task, mesh: ParallelMesh, batches: Sequence[Batch]) -> None:
    """Divide each loss's weights by their total over the data-parallel ranks, in place.

    Summed over ranks a loss is then the mean over its terms in the whole step. A step without a
    single term (all labels masked) has loss 0.
    """
    names = list(dict.fromkeys(task.loss_weights.values()))
    totals = torch.stack(
        [torch.stack([batch[name].sum() for batch in batches]).sum() for name in names]
    )
    mesh.all_reduce(totals, "dp")
    factors = 1.0 / totals.clamp(min=1.0)
    for batch in batches:
        for name, factor in zip(names, factors.unbind(), strict=True):
            batch[name] = batch[name] * factor


def backward(losses: Losses, aux_loss: Tensor | None, scale: Tensor | float) -> None:
    """Run the backward pass of the sum of all losses, times `scale`."""
    loss = torch.stack([value.reshape(()) for value in losses.values()]).sum()
    if aux_loss is not None:
        loss = loss + aux_loss
    # Autograd has a thread per device. A process has one device: waking that thread, and this one
    # again, costs the host 0.4 ms a step of one small layer (an H200's host).
    with torch.autograd.set_multithreading_enabled(False):
        (loss * scale).backward()


def add_losses(totals: Losses, losses: Losses) -> None:
    """Add a pass's losses to `totals`, detached."""
    for name, value in losses.items():
        value = value.detach()
        totals[name] = totals[name] + value if name in totals else value
