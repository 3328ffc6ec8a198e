"""When the steps of a run are told of, what was counted until then, and whether it goes on."""

from __future__ import annotations

from mb_train.data.batches import samples_of_step
from mb_train.logs.metrics import Accumulator
from mb_train.logs.timers import Clock
from mb_train.train.health import DivergenceGuard
from mb_train.train.interval import report_interval
from mb_train.train.run import Run
from mb_train.train.step import Step, params_norm


class Reports:
    """Tells of a run's steps, from where it stands now on, and watches whether they learn.

    Attributes:
        accumulator: takes the steps.
        first_loss: of the first step; None until it is told of.
        diverged: the loss was no number, or the gradients were none, for too long.
    """

    def __init__(self, run: Run, clock: Clock) -> None:
        self.accumulator = Accumulator(run.mesh)
        self.first_loss: float | None = None
        self.diverged = False
        self._run, self._clock = run, clock
        self._start = self._told = run.progress
        self._guard = DivergenceGuard(run.config.nan_limit)

    def tell(self, last: Step) -> str | None:
        """Print and log the steps since the last report, if there are any.

        Returns:
            Why to stop, if they learn nothing.
        """
        run, guard = self._run, self._guard
        if run.progress == self._told:
            return None
        norm = params_norm(run) if run.config.log_params_norm else None
        stats = self.accumulator.collect(last.grad_norm, norm, last.zeros_in_grad)
        report_interval(
            run,
            stats,
            seconds=self._clock.lap(),
            samples=run.progress.consumed_samples - self._told.consumed_samples,
            loss_scale=1.0 if run.scaler is None else run.scaler.state_dict()["scale"],
        )
        self._told = run.progress
        if self.first_loss is None:
            self.first_loss = stats.lm_losses[0]
        if not guard.see(stats.lm_losses, stats.stuck, run.progress.iteration):
            return None
        self.diverged = True
        assert guard.since is not None
        return guard.reason(run.data.train, self._samples_of(guard.since))

    def _samples_of(self, iteration: int) -> list[int]:
        """The training samples of a step since this start."""
        run, consumed = self._run, self._start.consumed_samples
        for _ in range(self._start.iteration + 1, iteration):
            consumed += run.batch_sizes.size(consumed)
        size, cyclic = run.batch_sizes.size(consumed), run.config.dataloader_type == "cyclic"
        return samples_of_step(run.data.train, consumed, size, cyclic=cyclic)
