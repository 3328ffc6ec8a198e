"""What a run measured, read back from its log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mb_train.logs.megatron_lines import perplexity
from mb_train.logs.run_log import log_of, replay
from mb_train.words import spelled

# Curve -> the entry of a "train" event.
_SERIES = {"grad_norm": "grad_norm", "step_ms": "ms_per_iteration", "mfu": "mfu"}
# Steps at which runs are compared.
_MILESTONES = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass
class Curves:
    """A run's measurements by iteration. Where a resumed run repeated steps, the later ones count.

    None stands for NaN or infinity. `load_imbalance` is, per layer, the load of the fullest expert
    over the mean; `tokens_per_expert` is [layers][experts].

    Attributes:
        torn: lines of the log that a kill cut short.
        start: the event of the last start: device, ranks, parameters, configuration.
        steps_redone: since that start, for rows of experts beyond the budget.
        profile: the event of the last profile.
        measured: what a task tells beside its losses, by name.
    """

    name: str
    loss: dict[int, float | None] = field(default_factory=dict)
    valid: dict[int, float | None] = field(default_factory=dict)
    test: dict[int, float | None] = field(default_factory=dict)
    grad_norm: dict[int, float | None] = field(default_factory=dict)
    tokens_per_s: dict[int, float | None] = field(default_factory=dict)
    step_ms: dict[int, float | None] = field(default_factory=dict)
    mfu: dict[int, float | None] = field(default_factory=dict)
    load_imbalance: dict[int, list[float]] = field(default_factory=dict)
    tokens_per_expert: dict[int, list[list[float]]] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    torn: int = 0
    steps_redone: int = 0
    profile: dict[str, Any] = field(default_factory=dict)
    measured: dict[int, dict[str, float | None]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last iteration."""
        return max(self.loss)

    @property
    def diverged_at(self) -> int | None:
        """The iteration from which on no loss was a number; None if the last one is."""
        since = None
        for iteration in sorted(self.loss, reverse=True):
            if self.loss[iteration] is not None:
                break
            since = iteration
        return since


def read_curves(folder: Path) -> Curves:
    """Read RUN/log.jsonl.

    Raises:
        ValueError: no log there, or nothing in it.
    """
    path = log_of(folder)
    curves = Curves(spelled(folder.resolve().name))
    for event, until in replay(path):
        try:
            _add(curves, event, until)
        except (KeyError, TypeError, AttributeError, ArithmeticError):
            raise ValueError(
                f"{path} holds an event {event.get('event')!r} that this mb-train cannot read."
            ) from None
    if not curves.loss:
        raise ValueError(f"{path} holds no training step yet.")
    return curves


def _add(curves: Curves, event: dict[str, Any], until: float) -> None:
    """Add what an event says of iterations up to `until`."""
    kind = event["event"]
    at = event.get("iteration", 0)
    if not (isinstance(at, int) and 0 <= at < 2**53):  # beyond which a picture has no numbers
        raise TypeError
    if kind == "torn":
        curves.torn += 1
    elif kind == "start":
        curves.start, curves.steps_redone = event, 0
        # Or raise, here and not where they are shown.
        _ = _decided(event), settings(event), layer_names(event, 0)
    elif kind == "train":
        _add_interval(curves, event, until)
    elif kind == "profile":
        curves.profile = event
        _ = _shares(event)
    elif at > until:
        return
    elif kind == "eval":
        series = curves.test if "test" in event["place"] else curves.valid
        series[event["iteration"]] = _value(event["lm_loss"])
    elif kind == "measured":
        about = ("event", "iteration", "place")
        found = {k: _value(v) for k, v in event.items() if k not in about}
        curves.measured[event["iteration"]] = found


def _add_interval(curves: Curves, event: dict[str, Any], until: float) -> None:
    last, losses = event["iteration"], [_value(loss) for loss in event["lm_losses"]]
    for iteration, loss in enumerate(losses, last - len(losses) + 1):
        if iteration <= until:
            curves.loss[iteration] = loss
    if last > until:
        return
    curves.tokens_per_s[last] = _value(event["tokens_per_s"])
    for name, key in _SERIES.items():
        getattr(curves, name)[last] = _value(event[key])
    curves.steps_redone = event["steps_redone"]
    if event.get("load_imbalance"):
        loads = [_value(load) for load in event["load_imbalance"]]
        if len(loads) != len(next(iter(curves.load_imbalance.values()), loads)):
            raise TypeError  # a run has the layers that it has
        curves.load_imbalance[last] = loads
    if event.get("tokens_per_expert"):
        rows = [[_value(count) for count in row] for row in event["tokens_per_expert"]]
        if len(set(map(len, rows))) > 1 or any(None in row for row in rows):
            raise TypeError
        curves.tokens_per_expert[last] = rows


def _value(value: Any) -> Any:
    """A number of a log, which others may have written; None for one that is not finite.

    Raises:
        TypeError, OverflowError: it is no number, or none of a float's size.
    """
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError
    return value if value is None or math.isfinite(value) else None


def _decided(start: dict[str, Any]) -> str:
    """What a start's notes say."""
    return "; ".join(start.get("notes") or [])


def settings(start: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a start."""
    return {} | (start.get("config") or {})


def layer_names(start: dict[str, Any], rows: int) -> list[str]:
    """Of the layers with experts, which so many rows are of; a log of before has no names."""
    names = [str(name) for name in start.get("moe_layers") or []]
    return names if len(names) == rows else [f"layer {row}" for row in range(rows)]


def _shares(profile: dict[str, Any]) -> str:
    """What a profile's step went into, in words."""
    step_ms = profile["step_ms"]
    shares = [
        f"{kind} {of['busy'] / step_ms:.1%} ({of['alone'] / step_ms:.1%} alone)"
        for kind, of in profile["kinds"].items()
    ]
    return f"{step_ms:.1f} ms: {', '.join(shares)}"


def median(values: Iterable[float | None], *, low: bool = False) -> float:
    """The middle one of those that are numbers; not a number if none is.

    Of two in the middle the higher one, with `low` the lower one: of times that of the higher rate.
    """
    known = [value for value in values if value is not None]
    middle = statistics.median_low if low else statistics.median_high
    return middle(known) if known else math.nan


def summary(curves: Curves) -> list[tuple[str, str]]:
    """What came out of a run, as names and values in words."""
    first, last = min(curves.loss), curves.last
    lines = [
        ("iterations", f"{first} to {last}"),
        ("training loss", f"{_words(curves.loss[first])} -> {_words(curves.loss[last])}"),
    ]
    passed = [f"{_words(curves.loss[at])} at {at}" for at in _MILESTONES if at in curves.loss]
    if passed:
        lines.append(("training loss of a step", ", ".join(passed)))
    for name, series in (("validation loss", curves.valid), ("test loss", curves.test)):
        if series:
            at = max(series)
            loss = series[at]
            ppl = "" if loss is None else f" (PPL {perplexity(loss):.2f})"
            lines.append((name, f"{_words(loss)}{ppl} at iteration {at}"))
    if curves.measured:
        at = max(curves.measured)
        found = curves.measured[at].items()
        lines += [(name, f"{_words(value)} at iteration {at}") for name, value in found]
    lines.append(("tokens per second", f"{median(curves.tokens_per_s.values()):,.0f}, the median"))
    for name, series, digits in (("ms a step", curves.step_ms, 1), ("MFU", curves.mfu, 3)):
        middle = median(series.values(), low=series is curves.step_ms)
        if not math.isnan(middle):
            lines.append((name, f"{middle:.{digits}f}, the median"))
    if decided := _decided(curves.start):
        lines.append(("decided at the start", decided))
    if curves.steps_redone:
        lines.append(("steps run again", f"{curves.steps_redone}, for rows beyond the budget"))
    if curves.profile:
        lines.append(("profile of a step", _shares(curves.profile)))
    if curves.load_imbalance:
        loads = curves.load_imbalance[max(curves.load_imbalance)]
        names = layer_names(curves.start, len(loads))
        by_layer = [f"{of}: {_words(load, 2)}" for of, load in zip(names, loads, strict=True)]
        lines.append(("expert load, max/mean", f"{', '.join(by_layer)} (at the end)"))
    if curves.diverged_at is not None:
        lines.append(
            ("diverged", f"the loss is not a number from iteration {curves.diverged_at} on")
        )
    if curves.torn:
        lines_of = "1 line was" if curves.torn == 1 else f"{curves.torn} lines were"
        lines.append(("log", f"{lines_of} cut short by a kill, and left out"))
    return lines


def _words(value: float | None, digits: int = 4) -> str:
    return "not a number" if value is None else f"{value:.{digits}f}"
