"""The frontier's picture, its numbers as JSON, and in words."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mb_train.folder.whole_files import replaced, write_text
from mb_train.report.axes import number_logarithmic
from mb_train.report.frontier import (
    FrontierRun,
    Point,
    SpeedUp,
    label_of,
    noise_of,
    points_of,
    read_run,
    same_size_speed_up,
    speed_up,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#0b6e4f", "#e07a1f", "#b5179e", "#3a86ff", "#6c757d", "#8d6e0f")
_FIXED = {"dense": "#222222", "dMoE": "#d1202f", "dMoE top-4": "#7f0f1d"}
_DASHES = ("-", "--", "-.", ":")


def report_frontier(folders: Sequence[Path], output: Path) -> tuple[str, Path, Path]:
    """Draw OUTPUT/frontier.png, write OUTPUT/frontier.json.

    Returns:
        The table in words; the picture; the numbers.

    Raises:
        ValueError: folders without a log, runs that do not belong together, or none that finished.
    """
    # A folder that is named twice is no second seed.
    runs = [read_run(folder) for folder in dict.fromkeys(path.resolve() for path in folders)]
    points = sorted(points_of(runs), key=lambda point: _rank(point.family))
    if not points:
        raise ValueError("Expected a run that came to the end of its schedule, found none.")
    found = _numbers(runs, points)
    output.mkdir(parents=True, exist_ok=True)
    picture, numbers = output / "frontier.png", output / "frontier.json"
    _draw(runs, points, picture)
    write_text(numbers, json.dumps(found, indent=1) + "\n")
    return _words(found), picture, numbers


def _numbers(runs: Sequence[FrontierRun], points: Sequence[Point]) -> dict[str, Any]:
    noise = noise_of(points)
    families = {p.family: [q for q in points if q.family == p.family] for p in points}
    comparisons = [
        _comparison(point, speed_up(point, family, noise), points)
        for point in points
        for name, family in families.items()
        if (_is_dropless(point.family) or name == "dense") and point.family != name
    ]
    return {
        "device": runs[0].device,
        "tokens": points[0].runs[0].tokens[-1],
        "noise": {
            "loss": _finite(noise.loss), "log_seconds": _finite(noise.log_seconds),
            "degrees_of_freedom": noise.freedom,
        },
        "points": [
            {
                "family": point.family, "size": label_of(point.shape, points),
                "layers": point.shape[0], "hidden": point.shape[1],
                "parameters": point.runs[0].parameters,
                "valid_loss": point.loss, "train_seconds": point.seconds,
                "tokens_per_second": point.runs[0].tokens[-1] / point.seconds,
                "runs": [
                    {
                        "name": run.name, "seed": run.seed, "valid_loss": run.losses[-1],
                        "train_seconds": run.seconds[-1], "overhead_seconds": run.overhead_s,
                    }
                    for run in point.runs
                ],
            }
            for point in points
        ],
        "speed_ups": comparisons,
        "unfinished": [run.name for run in runs if not run.finished],
    }  # fmt: skip


def _comparison(point: Point, found: SpeedUp, points: Sequence[Point]) -> dict[str, Any]:
    twins = [p for p in points if (p.family, p.shape) == (found.over, point.shape)]
    twin = min(twins, key=lambda p: p.loss, default=None)
    return {
        "point": f"{point.family} {label_of(point.shape, points)}",
        "over": found.over,
        "speed_up": found.value,
        "lower_bound": found.bound,
        "interval_95": None if found.interval is None else [_finite(x) for x in found.interval],
        "same_size_speed_up": None if twin is None else same_size_speed_up(point, twin),
    }


def _words(found: dict[str, Any]) -> str:
    lines = [f"{found['tokens']:,} tokens each on {found['device']}"]
    for p in found["points"]:
        lines.append(
            f"  {p['family']:<10} {p['size']:>5}: loss {p['valid_loss']:.4f} in "
            f"{p['train_seconds']:,.1f} s ({p['tokens_per_second']:,.0f} tokens/s, "
            f"{' and '.join(run['name'] for run in p['runs'])})"
        )
    for c in found["speed_ups"]:
        if c["lower_bound"] and c["speed_up"] < 1 and c["same_size_speed_up"] is None:
            continue  # that family has smaller sizes alone: "later than 0.4 x" says nothing
        if c["speed_up"] is None:
            said = "its curve begins below that loss"
        elif c["lower_bound"]:
            said = f"below all of it, whose end took {c['speed_up']:.2f} x the time"
        else:
            said = f"{c['speed_up']:.2f} x sooner"
        if c["interval_95"] is not None and any(c["interval_95"]):
            low, high = ("beyond" if x is None else f"{x:.2f}" for x in c["interval_95"])
            said += f" (95 %: {low} to {high})"
        if c["same_size_speed_up"] is not None:
            said += f"; {c['same_size_speed_up']:.2f} x than the same size"
        lines.append(f"  {c['point']} over {c['over']}: {said}")
    if found["unfinished"]:
        lines.append(f"  not at their end, or diverged: {', '.join(found['unfinished'])}")
    return "\n".join(lines)


def _draw(runs: Sequence[FrontierRun], points: Sequence[Point], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_tokens = figure.subplots(1, 2, sharey=True)
    colors = _colors(runs)
    shapes = sorted({run.shape for run in runs})
    for run in runs:
        style = {
            "color": colors[run.family], "linewidth": 0.8,
            "linestyle": _DASHES[shapes.index(run.shape) % len(_DASHES)],
        }  # fmt: skip
        by_time.plot(run.seconds, run.losses, alpha=0.45, **style)
        by_tokens.plot([t / 1e6 for t in run.tokens], run.losses, **style)
    for family in sorted({run.family for run in runs}, key=_rank):
        of_family = [p for p in points if p.family == family]
        by_time.plot(
            [p.seconds for p in of_family], [p.loss for p in of_family], "o-",
            color=colors[family], label=family, markersize=5, zorder=3,
        )  # fmt: skip
        for run in (run for p in of_family if len(p.runs) > 1 for run in p.runs):
            by_time.plot(run.seconds[-1], run.losses[-1], "x", color=colors[family], markersize=5)
        if family == "dense" or _is_dropless(family):  # the others lie between
            _name_sizes(by_time, of_family, points, colors[family])
    for shape, dashes in zip(shapes, _DASHES * len(shapes), strict=False):
        by_tokens.plot([], [], color="gray", linestyle=dashes, label=label_of(shape, points))
    # The first losses of a run are far above all that matters.
    low = min(p.loss for p in points)
    high = max(p.loss for p in points)
    margin = max(high - low, 0.02)
    by_time.set_ylim(low - 0.25 * margin, high + 0.8 * margin)
    by_time.set_xscale("log")
    shortest = min(p.seconds for p in points)
    by_time.set_xlim(shortest / 3, 1.6 * max(p.seconds for p in points))
    number_logarithmic(by_time.xaxis)
    by_time.set_xlabel("seconds of training")
    by_time.set_ylabel("validation loss (nats per token)")
    by_tokens.set_xlabel("million tokens")
    for axis in (by_time, by_tokens):
        axis.grid(alpha=0.3, which="both" if axis is by_time else "major")
        axis.legend(fontsize=8)
    with replaced(path) as draft:
        figure.savefig(draft, dpi=130, format="png")


def _name_sizes(
    axis: Axes, of_family: Sequence[Point], points: Sequence[Point], color: str
) -> None:
    for point in of_family:
        axis.annotate(
            label_of(point.shape, points), (point.seconds, point.loss), fontsize=8,
            textcoords="offset points", color=color,
            xytext=(5, 5) if point.family == "dense" else (-30, -4),
        )  # fmt: skip


def _rank(family: str) -> tuple[int, str]:
    """Dense, then experts by capacity, then those without one."""
    return (0 if family == "dense" else 2 if _is_dropless(family) else 1, family)


def _is_dropless(family: str) -> bool:
    return family.startswith("dMoE")


def _colors(runs: Sequence[FrontierRun]) -> dict[str, str]:
    others = sorted({run.family for run in runs} - _FIXED.keys())
    return _FIXED | {family: _COLORS[i % len(_COLORS)] for i, family in enumerate(others)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
