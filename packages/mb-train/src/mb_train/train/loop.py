"""The training loop: step, log, evaluate, save, stop.

What is due after an optimizer step (`step`) comes in Megatron-LM's order: log, evaluate, save. A
reason to stop before the end (SIGTERM, `--exit-duration-in-mins`, `--exit-interval`) is looked for
after each step and each evaluation; the last step is then logged and saved. Nothing is read back
from the device but once per log interval, and what a step itself needs. A run is a function of its
configuration alone: rates follow from the samples consumed, dropout from (seed, step, micro-batch),
so a run that is stopped and resumed takes the same steps to the bit on a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import sys
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
from mb_parallel import any_rank, check_same, distributed, rank, world_size

from mb_train.checkpoint.finite import all_finite
from mb_train.checkpoint.read import Progress
from mb_train.config import TrainConfig
from mb_train.data.batches import DataError
from mb_train.folder import run_folder
from mb_train.folder.start import Start, find_start
from mb_train.logs.megatron_lines import datetime_line, validation_lines
from mb_train.logs.timers import Clock
from mb_train.machine.device import device_type
from mb_train.machine.host import before_the_others, collect_meshes, leave_out_of_collections
from mb_train.machine.signals import StopFlag, stop_signals
from mb_train.models.fp32 import fp32_by_default
from mb_train.plan.words import LESS_MEMORY
from mb_train.tasks import Batch
from mb_train.train.own_folder import only_writer
from mb_train.train.profiling import Profiler
from mb_train.train.reports import Reports
from mb_train.train.run import Run
from mb_train.train.step import train_step
from mb_train.train.validate import END, evaluate, measure

# By then kernels are built, blocks compiled, and what a step keeps for the next is there.
_STEPS_OF_SETTING_UP = 3


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are None where nothing was measured.

    `checkpoint` is the latest whole one; `diverged` says that steps learned nothing for too long
    (`DivergenceGuard`), `failed` that the run stopped, and saved, because a process that reads
    samples had ended.
    """

    iteration: int
    first_loss: float | None
    valid_loss: float | None
    checkpoint: Path | None
    stopped_by: str | None
    diverged: bool
    failed: bool = False

    def exit_code(self, config: TrainConfig) -> int:
        """Of a program whose run this was: 0, or 1 if it did not end well."""
        return 1 if self.diverged or self.failed or self.unsaved(config) else 0

    def unsaved(self, config: TrainConfig) -> bool:
        """Whether the end of the run is in no checkpoint though it was to be."""
        if config.save is None or config.save_interval == 0:
            return False
        return self.checkpoint is None or run_folder.iteration_of(self.checkpoint) != self.iteration


def train(config: TrainConfig, start: Start | None = None) -> Result:
    """Train as `config` says, on this process or as one rank of a torchrun job.

    Args:
        config: all settings. If it has a `load`, the run goes on from there, up to `train_iters`
            in all; it does not take settings from there, as `--load` does.
        start: the checkpoint that was found there already.

    Raises:
        ValueError: what was asked for does not fit together, the data or the machine; nothing has
            been written but, perhaps, the sample corpus. Or the data is damaged further on.
        OSError: files that cannot be read or written.
    """
    started = time.monotonic()  # setting up is part of the time that a run has
    notes: tuple[str, ...] = ()
    if start is None:
        with before_the_others():
            found = find_start(config)
        config, start, notes = found.config, found.start, found.notes
    with (
        _less_memory_named(),
        # Whatever came before: a Ctrl-C may fall between the two halves of torch's own no_grad.
        torch.inference_mode(False),
        torch.enable_grad(),
        fp32_by_default(),
        warnings.catch_warnings(),
        joined(config, start) as device,
        _let_go(),
        torch.autocast(device.type, enabled=False),  # the dtype to compute with is the config's
        torch.random.fork_rng([device] if device.type == "cuda" else []),  # steps seed torch's own
        only_writer(config.save) as recovered,
        stop_signals() as stop,
        _deterministic(config.deterministic_mode),
    ):
        # torch's checkpoint writer, in whatever thread: one process is what was asked for.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        run = Run(config, device, start)
        for line in (*recovered, *(f"note: {note}" for note in notes)):
            run.say(f" {line}")
        if config.exit_duration_in_mins is not None:
            stop.deadline = started + 60 * config.exit_duration_in_mins
        ended = False
        try:
            result = _loop(run, stop)
            ended = True
            return result
        except DataError as error:
            # Of the next step's samples, or those of an evaluation.
            raise DataError(f"After iteration {run.progress.iteration}: {error}") from None
        except ValueError as error:
            # Set up, a run has nothing wrong to be told: this is a defect, and wants its traceback.
            raise RuntimeError(f"after iteration {run.progress.iteration}") from error
        except RuntimeError as error:
            if world_size() > 1:
                error.add_note(f"It was in iteration {run.progress.iteration + 1}.")
            raise
        finally:
            run.close(together=ended)
            del run


@contextlib.contextmanager
def _let_go() -> Generator[None]:
    """At its end let go of a run, in a process that may have another one."""
    try:
        yield
    finally:
        gc.unfreeze()  # a run that is over is garbage like any other
        if world_size() > 1:
            collect_meshes()


@contextlib.contextmanager
def joined(config: TrainConfig, start: Start | None) -> Generator[torch.device]:
    """Be one of the ranks that train as `config` says, on the device that this yields.

    Args:
        start: what this rank found at `load`, perhaps in a folder that others know another by.

    Raises:
        ValueError: on all ranks, if they found different checkpoints, or some see the run's end.
    """
    found = None if start is None else {**start.told, "ended": start.is_end_of(config)}
    timeout_s = 60 * config.distributed_timeout_minutes
    with distributed(device_type(config.device), timeout_s=timeout_s) as device:
        check_same(found, "the checkpoint to go on from")
        yield device


@contextlib.contextmanager
def _less_memory_named() -> Generator[None]:
    """Add to the error of a GPU without enough memory what takes less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"{LESS_MEMORY}; mb-train plan shows what takes how much.")
        raise


def _loop(run: Run, stop: StopFlag) -> Result:
    """Step until the end, or until there is a reason to stop before it."""
    config, start, clock = run.config, run.progress, Clock(run.device)
    begun, reports = time.monotonic(), Reports(run, clock)
    profiler = Profiler(config, here=rank() == 0)
    valid_losses: dict[str, float] = {}
    stopped_by = None
    iteration = evaluated_at = saved_at = start.iteration
    if config.skip_train:
        run.say("skipping training (--skip-train is on) ...")
    else:
        run.say("training ...")
        run.say(datetime_line("before the start of training step"))
    stream = _training_stream(run, stop)
    while iteration < run.iterations and stopped_by is None:
        if profiler.begins(iteration - start.iteration):
            with clock.paused():
                profiler.start()
        done = train_step(run, stream, reports.accumulator)
        iteration = run.progress.iteration
        if iteration - start.iteration == _STEPS_OF_SETTING_UP:
            with clock.paused():
                leave_out_of_collections()
        stopped_by = _reason_to_stop(run, stop)
        evaluates = _due(config.eval_interval, iteration)
        saves = _due(config.save_interval, iteration)
        # What is due after this step would count as the steps' own, and may end the run.
        breaks = stopped_by is not None or iteration == run.iterations or evaluates or saves
        if profiler.ends(iteration - start.iteration, stopping=breaks):
            with clock.paused():
                _tell_profile(run, profiler, iteration - start.iteration)
        if run.reports(iteration) or stopped_by is not None:
            stopped_by = reports.tell(done) or stopped_by
        run.sign_of_life(_how_far(run, start, time.monotonic() - begun))
        if evaluates:
            with clock.paused():
                valid_losses = evaluate(run, run.data.valid, f"iteration {iteration}", stop)
            evaluated_at = iteration
            stopped_by = stopped_by or _reason_to_stop(run, stop)
            if stopped_by is not None:
                stopped_by = reports.tell(done) or stopped_by
        if saves:
            with clock.paused():
                save(run)
            saved_at = iteration
        elif run.saver is not None:
            run.saver.poll()
    stream.close()
    if not config.skip_train:
        run.say(datetime_line("after training is done"))
    saved = saved_at == iteration
    if stopped_by is None:
        known = valid_losses if evaluated_at == iteration else {}
        valid_losses = _end(run, stop, known, saved=saved)
    else:
        run.say(datetime_line(f"exiting program at iteration {iteration}"))
        run.say(f" stopping at iteration {iteration}: {stopped_by}")
        _save_last(run, saved=saved)
    valid_loss = next(iter(valid_losses.values()), None)
    checkpoint = None if run.folder is None else run_folder.find_checkpoint(run.folder)
    failed = any_rank(stop.failed)
    if stop.failed and rank() != 0:  # the others do not know why
        print(f"rank {rank()}: {stop.reason}", file=sys.stderr)
    first_loss, diverged = reports.first_loss, reports.diverged
    return Result(iteration, first_loss, valid_loss, checkpoint, stopped_by, diverged, failed)


def _due(interval: int | None, iteration: int) -> bool:
    """Whether what comes every so many steps, None or 0 for never, comes after this one."""
    return bool(interval) and iteration % interval == 0


def _end(run: Run, stop: StopFlag, known: dict[str, float], *, saved: bool) -> dict[str, float]:
    """What a run that came to its end tells and keeps of its model; its validation losses.

    An evaluation that the end of the time breaks off is made again once the last step is saved.

    Args:
        known: these losses, if the last step was followed by an evaluation.
        saved: whether it was followed by a checkpoint.
    """
    if known:
        run.say(validation_lines(END, known))
    losses = known or evaluate(run, run.data.valid, END, stop)
    _save_last(run, saved=saved)
    late = any_rank(stop.late)
    stop.deadline = math.inf  # nothing can be lost any more
    if late:
        losses = losses or evaluate(run, run.data.valid, END, stop)
    if losses:
        measure(run, run.data.valid, END)
    evaluate(run, run.data.test, "the end of training for test data", stop)
    return losses


def _save_last(run: Run, *, saved: bool) -> None:
    """Have the last step in a checkpoint that is whole."""
    if not saved:
        save(run)
    if run.saver is not None:
        run.saver.wait()


def _tell_profile(run: Run, profiler: Profiler, step: int) -> None:
    iteration = run.progress.iteration
    keep = None if run.folder is None else run.folder / f"trace_{iteration:07d}.json.gz"
    found, kept = profiler.stop(step, keep)
    run.say(f"{found.lines()}\n{kept}")
    run.log.write("profile", iteration=iteration, **dataclasses.asdict(found))


def save(run: Run) -> None:
    """Write a checkpoint of where the run stands, if it has a folder, or begin to."""
    if run.saver is None:
        return
    if not all_finite(run.last_losses.values()):
        run.saver.wait()
        at = run.progress.iteration
        run.say(f" not saved: at iteration {at} the loss is not a number. {run.saver.in_force()}")
        return
    begun = time.monotonic()
    with run.timers("save-checkpoint"):
        saved = run.saver.save(
            run.model.parts,
            None if run.config.no_save_optim else run.optimizer,
            run.progress,
            config=dataclasses.asdict(run.config),
            identity=run.identity,
            data=run.data.identity,
            state=run.state(),
        )
    run.say(run.timers.lines("save-checkpoint"))
    if saved:
        seconds = time.monotonic() - begun
        run.log.write("save", iteration=run.progress.iteration, seconds=seconds)


def _training_stream(run: Run, stop: StopFlag) -> Generator[Batch]:
    """Micro-batches from where the run stands; none if it is at its end."""
    if run.progress.iteration < run.iterations:
        samples = run.progress.consumed_samples
        yield from run.stream(run.data.train, consumed_samples=samples, stop=stop)


def _how_far(run: Run, start: Progress, seconds: float) -> str:
    """Where a run stands, and how long it still needs at the pace it has had."""
    done = run.progress.iteration
    left = round(seconds / (done - start.iteration) * (run.iterations - done))
    hours, minutes = left // 3600, left // 60 % 60
    long = f"{hours} h {minutes} min" if hours else f"{minutes} min {left % 60} s"
    return f"iteration {done} of {run.iterations} is done, {long} left"


def _reason_to_stop(run: Run, stop: StopFlag) -> str | None:
    """Why to save and stop before the end, agreed by all ranks."""
    config, iteration = run.config, run.progress.iteration
    if any_rank(stop.reason is not None):
        return stop.reason or "a signal to another rank, or a failure of its data"
    limit = config.exit_duration_in_mins
    if limit is not None and iteration < run.iterations and any_rank(stop.late):
        return f"--exit-duration-in-mins {limit:g}"
    if _due(config.exit_interval, iteration) and iteration < run.iterations:
        return f"--exit-interval {config.exit_interval}"
    return None


@contextlib.contextmanager
def _deterministic(asked: bool) -> Generator[None]:
    """torch's own switch, for as long as the context lasts; our kernels add up in a fixed order."""
    if not asked:  # the switch imports torch's compiler, even to stay as it is
        yield
        return
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
