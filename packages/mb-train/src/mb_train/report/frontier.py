"""The frontier of validation loss against training time, from the logs of finished runs.

MegaBlocks' evidence (Gale et al., arXiv 2211.15841, figure 7) is that dropless experts reach the
loss of a dense model sooner. A point here is a model trained to the end of its schedule on the
tokens that all others had; a family (dense, MoE of a capacity factor, dMoE) is a curve through its
sizes. The speed-up of a point over a family is the time at which that family's curve reaches the
point's loss over the point's own time: log time between two sizes is linear in loss.

Time is training alone. The log leaves out evaluations and checkpoints; here the first interval
after a start, which compiles, and steps lost to a kill are charged at the run's median pace.

The uncertainty comes from runs that differ in their seed alone: their spread in loss and in log
time, pooled over all points that have several, is put on every point (Student's t, for two seeds of
two points are few), and the interval holds the middle 95 % of the speed-ups that follow.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mb_train.config import GROUPS, TrainConfig
from mb_train.config.data import WAYS as DATA_WAYS
from mb_train.config.field import spec
from mb_train.logs.run_log import log_of, number, replay

_DRAWS = 4000
# Runs of one picture must agree in these, or their points answer different questions.
_SHARED = ("train_iters", "train_samples", "global_batch_size", "seq_length", "tokenizer", "model")
_SHARED += DATA_WAYS
# The validation set: its documents, of which it is the first so many batches.
_SHARED += ("split", "split_rounding", "eval_iters")
# Runs of one point must agree in all fields but these.
_OF_A_RUN = {"seed", "device", "data_cache_path", "num_workers"}
_OF_A_RUN |= {f.name for f in fields(TrainConfig) if spec(f).on_load == "own"}
_OF_A_RUN |= {f.name for group in ("checkpointing", "logging") for f in fields(GROUPS[group])}


@dataclass(frozen=True)
class FrontierRun:
    """One run: its validation losses beside the tokens and the seconds of training until then.

    Attributes:
        shape: layers and width, which pair the sizes of the families.
        overhead_s: left out of the seconds: what first steps after a start took beyond the pace.
        finished: whether its last evaluation is at the end of its schedule, and a number.
        shared: what all runs of a picture must agree in.
        settings: what all runs of a point must agree in.
    """

    name: str
    family: str
    shape: tuple[int, int]
    seed: int
    parameters: int
    device: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    overhead_s: float
    finished: bool
    shared: tuple[Any, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """A model of the frontier: the mean over its seeds.

    Attributes:
        seconds: of training to the end, geometric mean.
        loss: of validation at the end.
    """

    family: str
    shape: tuple[int, int]
    seconds: float
    loss: float
    runs: tuple[FrontierRun, ...]


@dataclass(frozen=True)
class Noise:
    """Standard deviations from seed to seed; nothing is known where `freedom` is 0."""

    loss: float
    log_seconds: float
    freedom: int


@dataclass(frozen=True)
class SpeedUp:
    """How much sooner a point has its loss than a family's curve.

    Attributes:
        value: seconds of the curve at the point's loss over the point's seconds. None if the curve
            begins below that loss. If it ends above, its last seconds count: a lower bound.
        bound: whether it is that lower bound.
        interval: of 95 %; None without seeds to take it from. Infinity is an end that was not
            found.
    """

    point: Point
    over: str
    value: float | None
    bound: bool
    interval: tuple[float, float] | None


def read_run(folder: Path) -> FrontierRun:
    """A run's losses and seconds from RUN/log.jsonl.

    Raises:
        ValueError: no log, no training step, no evaluation, or events of another program.
    """
    path = log_of(folder)
    try:
        run = _run_of(path)
        hash((run.settings, run.tokens))  # points are found by them: no list stands for a number
        return run
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a log that this mb-train can read: {error!r}.") from error


def _run_of(path: Path) -> FrontierRun:
    start: dict[str, Any] = {}
    intervals: dict[int, tuple[int, float, bool]] = {}  # by last step: steps, seconds each, cold
    valid: dict[int, float] = {}
    samples: dict[int, int] = {}  # at evaluations
    cold = True
    for event, until in replay(path):
        kind = event["event"]
        if kind == "start":
            start, cold = event, True
        elif event.get("iteration", 0) > until:
            continue
        elif kind == "train":
            pace = event["ms_per_iteration"] / 1000
            intervals[event["iteration"]] = (len(event["lm_losses"]), pace, cold)
            cold = False
        elif kind == "eval" and "test" not in event["place"]:
            valid[event["iteration"]] = number(event["lm_loss"])
            samples[event["iteration"]] = event["consumed_samples"]
    if not intervals or not valid:
        raise ValueError(f"Expected training steps and evaluations in {path}, found none.")
    config = start["config"]
    clock, overhead = _seconds_by_step(intervals, max(valid))
    at = sorted(valid)
    # As a run that goes on takes a field that its configuration lacks.
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    return FrontierRun(
        name=path.parent.resolve().name,
        family=family_of(config),
        shape=(config["num_layers"], config["hidden_size"]),
        seed=config["seed"],
        parameters=start["parameters"],
        device=f"{start['ranks']} x {start['device']}",
        tokens=tuple(samples[i] * start["tokens_per_sample"] for i in at),
        seconds=tuple(clock[i] for i in at),
        losses=tuple(valid[i] for i in at),
        overhead_s=overhead,
        finished=at[-1] == start["iterations"] and math.isfinite(valid[at[-1]]),
        shared=tuple(config.get(name, defaults[name]) for name in _SHARED),
        settings=tuple(
            tuple(value) if isinstance(value, list) else value
            for f in fields(TrainConfig)
            if f.name not in _OF_A_RUN
            for value in [config.get(f.name, defaults[f.name])]
        ),
    )


def family_of(config: dict[str, Any]) -> str:
    """What a run is compared as: "dense", "dMoE", "dMoE top-2", or "MoE cf 1.5"."""
    if not config.get("moe_num_experts"):
        return "dense"
    factor, chosen = config.get("moe_capacity_factor"), config.get("moe_top_k", 1)
    family = f"MoE cf {factor:g}" if factor else "dMoE"
    return family if chosen == 1 else f"{family} top-{chosen}"


def points_of(runs: Iterable[FrontierRun]) -> list[Point]:
    """The finished runs, those that differ in their seed alone as one; by family, then by time.

    Raises:
        ValueError: runs of other lengths, batches, data or devices beside each other.
    """
    runs = list(runs)
    for name, values in (
        ("device", [run.device for run in runs]),
        *((name, [run.shared[i] for run in runs]) for i, name in enumerate(_SHARED)),
    ):
        for run, value in zip(runs, values, strict=True):
            if value != values[0]:
                raise ValueError(
                    f"Expected runs of one {name}, got {values[0]!r} of {runs[0].name} and "
                    f"{value!r} of {run.name}. Draw them apart."
                )
    grouped: dict[tuple[Any, ...], list[FrontierRun]] = {}
    for run in runs:
        if run.finished:
            grouped.setdefault(run.settings, []).append(run)
    found = [
        Point(
            group[0].family,
            group[0].shape,
            seconds=math.exp(statistics.fmean(math.log(run.seconds[-1]) for run in group)),
            loss=statistics.fmean(run.losses[-1] for run in group),
            runs=tuple(group),
        )
        for group in grouped.values()
    ]
    return sorted(found, key=lambda point: (point.family, point.seconds))


def noise_of(points: Iterable[Point]) -> Noise:
    """The spread over seeds, pooled."""
    loss = log_seconds = 0.0
    freedom = 0
    for point in points:
        losses = [run.losses[-1] for run in point.runs]
        times = [math.log(run.seconds[-1]) for run in point.runs]
        loss += sum((x - statistics.fmean(losses)) ** 2 for x in losses)
        log_seconds += sum((x - statistics.fmean(times)) ** 2 for x in times)
        freedom += len(point.runs) - 1
    if not freedom:
        return Noise(math.nan, math.nan, 0)
    return Noise(math.sqrt(loss / freedom), math.sqrt(log_seconds / freedom), freedom)


def speed_up(point: Point, family: Sequence[Point], noise: Noise) -> SpeedUp:
    """How much sooner `point` has its loss than the curve through `family`."""
    curve = [(p.loss, math.log(p.seconds)) for p in family]
    reached, bound = _log_seconds_at(point.loss, curve)
    log_seconds = math.log(point.seconds)
    value = None if reached is None else math.exp(reached - log_seconds)
    interval = None
    if value is not None and noise.freedom:
        draws, spread = [], random.Random(0)
        weights = [1 / math.sqrt(len(p.runs)) for p in (point, *family)]
        for _ in range(_DRAWS):
            # One draw of how large the noise is, then of everything that it touches.
            width = math.sqrt(noise.freedom / spread.gammavariate(noise.freedom / 2, 2))
            (loss, time), *moved = (
                (x + w * width * noise.loss * spread.gauss(0, 1),
                 t + w * width * noise.log_seconds * spread.gauss(0, 1))
                for (x, t), w in zip([(point.loss, log_seconds), *curve], weights, strict=True)
            )  # fmt: skip
            then, out = _log_seconds_at(loss, moved)
            draws.append(0.0 if then is None else math.inf if out else math.exp(then - time))
        draws.sort()
        interval = (draws[round(0.025 * _DRAWS)], draws[round(0.975 * _DRAWS) - 1])
    return SpeedUp(point, family[0].family, value, bound, interval)


def same_size_speed_up(point: Point, other: Point) -> float | None:
    """Seconds that `other` took over those until `point`'s validation curve has `other`'s loss.

    The mean over the runs of `point`; None if one of them never reaches it. A low estimate, because
    the learning rate of `point` has not decayed yet at that time.
    """
    found = []
    for run in point.runs:
        below = next((i for i, loss in enumerate(run.losses) if loss <= other.loss), None)
        if below is None:
            return None
        seconds = run.seconds[below]
        if below and math.isfinite(run.losses[below - 1]):
            high, low = run.losses[below - 1], run.losses[below]
            share = (high - other.loss) / (high - low)
            seconds = run.seconds[below - 1] + share * (seconds - run.seconds[below - 1])
        found.append(other.seconds / seconds)
    return statistics.fmean(found)


def _log_seconds_at(loss: float, curve: Sequence[tuple[float, float]]) -> tuple[float | None, bool]:
    """Log seconds at which a family reaches a loss, and whether that is only a lower bound.

    Points that another one beats in both loss and time are not part of the curve.
    """
    ordered: list[tuple[float, float]] = []
    for point in sorted(curve, key=lambda p: (p[1], p[0])):
        if not ordered or point[0] < ordered[-1][0]:
            ordered.append(point)
    if loss > ordered[0][0]:
        return None, False
    if loss < ordered[-1][0]:
        return ordered[-1][1], True
    if loss == ordered[0][0]:
        return ordered[0][1], False
    after = bisect_left([-x for x, _ in ordered], -loss)
    (high, early), (low, late) = ordered[after - 1], ordered[after]
    return early + (high - loss) / (high - low) * (late - early), False


def _seconds_by_step(
    intervals: dict[int, tuple[int, float, bool]], last: int
) -> tuple[list[float], float]:
    """Seconds of training until the end of every step, from step 0; and what was left out."""
    warm = [pace for _, pace, cold in intervals.values() if not cold]
    usual = statistics.median(warm or [pace for _, pace, _ in intervals.values()])
    paces, overhead = [usual] * max(last, *intervals), 0.0
    for end, (steps, pace, cold) in intervals.items():
        if cold:
            overhead += steps * (pace - usual)
        else:
            paces[end - steps : end] = [pace] * steps
    return [0.0, *itertools.accumulate(paces)], overhead


def label_of(shape: tuple[int, int], points: Iterable[Point]) -> str:
    """A size by the parameters of its dense model, where there is one: "125M"."""
    dense = next((p for p in points if p.shape == shape and p.family == "dense"), None)
    if dense is None:
        return f"{shape[0]}x{shape[1]}"
    millions = dense.runs[0].parameters / 1e6
    return f"{millions:.0f}M" if millions >= 10 else f"{millions:.1f}M"
