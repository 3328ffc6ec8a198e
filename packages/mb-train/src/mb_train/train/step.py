"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update.

Nothing is read back from the device but what some flags need: whether an fp16 update was skipped,
how many rows a rank's experts get (`--moe-row-policy`), and the load by which
`--moe-rebalance-interval` moves experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from mb_parallel.optimizer import clip_and_step, weight_norm, zeros_in_grad
from mb_parallel.random import seed_micro_batch
from torch import Tensor

from mb_train.assembly.execute import Work, weigh
from mb_train.assembly.optimizer import apply_schedule
from mb_train.checkpoint.read import Progress
from mb_train.logs.metrics import Accumulator
from mb_train.tasks import Batch
from mb_train.train.run import Run


class Step(NamedTuple):
    """What is known of a step, on the device; `zeros_in_grad` is None if not asked for."""

    grad_norm: Tensor
    zeros_in_grad: Tensor | None


def train_step(run: Run, stream: Iterator[Batch], accumulator: Accumulator) -> Step:
    """One optimizer step over the next micro-batches."""
    config, mesh = run.config, run.mesh
    iteration, samples = run.progress.iteration, run.progress.consumed_samples
    apply_schedule(run.optimizer, run.schedule, samples - run.skipped_samples)
    size = run.batch_sizes.size(samples)
    with run.timers("batch-generator", level=2):
        batches = list(itertools.islice(stream, run.batch_sizes.micro_batches(size)))
    weigh(run.task, mesh, batches)

    def before(index: int) -> None:
        # Dropout, jitter and noise follow from (seed, step, place of the micro-batch in the global
        # batch): no generator's state has to be saved, and any number of ranks draws the same. (A
        # part of a sequence has a place of its own.)
        place = index * mesh.dp_size + mesh.dp_rank
        seed_micro_batch(config.seed, step=iteration, place=place)
        run.sign_of_life(f"iteration {iteration + 1} of {run.iterations} is under way")

    def measured(metrics: dict[str, Tensor]) -> None:
        accumulator.add_pass(metrics)
        run.load_balance.see(metrics)

    run.model.train()
    scale = 1.0 if run.scaler is None else run.scaler.scale_on(run.device)
    # Then a skipped step is no search for a scale.
    lowest = 1.0 if run.scaler is None else run.scaler.lowest()
    with run.timers("forward-backward", level=1):
        losses = run.model.executor.step(Work(batches, scale, before, measured))
    with run.timers("optimizer", level=1):
        done = clip_and_step(
            run.optimizer,
            max_norm=config.clip_grad,
            mesh=mesh,
            scaler=run.scaler,
            uncounted=run.model.copies,
        )
        # In every step, as in Megatron: a signal may make any step one that is reported.
        zeros = _zeros_in_grad(run) if config.log_num_zeros_in_grad else None
        run.optimizer.zero_grad(set_to_none=True)
        changed = run.load_balance.update(iteration + 1, run.optimizer)
    if changed is not None:
        run.say(changed.said)
        accumulator.renumber(changed.orders)
    if run.scaler is not None and done.skipped.item():
        run.skipped_samples += size
    run.last_losses = losses
    accumulator.add_iteration(losses, done.skipped, stuck=done.skipped * lowest)
    run.progress = Progress(iteration + 1, samples + size)
    return Step(done.grad_norm, zeros)


def params_norm(run: Run) -> Tensor:
    """The L2 norm of all weights, as `grad_norm` takes it of gradients."""
    return weight_norm(_weights(run), run.mesh, uncounted=run.model.copies)


def _zeros_in_grad(run: Run) -> Tensor:
    """How many gradients are zero, in the whole model."""
    return zeros_in_grad(_weights(run), run.mesh, uncounted=run.model.copies)


def _weights(run: Run) -> list[Tensor]:
    return [p for part in run.model.parts for p in part.parameters()]
