"""What there is to see of runs, a panel for each.

Loss with perplexity, throughput, gradient norm, and how evenly the experts are loaded: a heat map
of layers over time, and one of experts over layers at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mb_train.logs.run_log import number
from mb_train.report.axes import number_logarithmic, written
from mb_train.report.curves import Curves, layer_names
from mb_train.report.fonts import families
from mb_train.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Figure", "Axes", Sequence[Curves]], None]

# A longer series is cut into at most this many stretches, drawn as their means in a band from
# minimum to maximum. A picture has no more columns, and a page with every step of a long run would
# take minutes to load.
_POINTS = 1000
_BESIDE = (1.02, 0.0, 0.015, 1.0)  # where a colour bar stands: all panels are equally wide
_MARKED = 60  # beyond this many the dots run into each other
# What fits: letters of a name in a legend or a title, names below each other in a legend, numbers
# beside an axis.
_LETTERS, _NAMES, _NUMBERS = 40, 8, 12


def panels_of(runs: Sequence[Curves]) -> list[tuple[str, Panel]]:
    """Titles and what is drawn below them."""
    panels: list[tuple[str, Panel]] = [
        ("Loss and perplexity", _loss),
        ("Tokens per second", _speed),
    ]
    if any(v is not None for curves in runs for v in curves.grad_norm.values()):
        panels.append(("Gradient norm", _grad_norm))
    for curves in runs:
        whose = "" if len(runs) == 1 else f"{_name(curves, runs)}: "
        if curves.load_imbalance:
            panels.append((f"{whose}Load of the fullest expert over the mean", _load_of(curves)))
        if curves.tokens_per_expert:
            panels.append((f"{whose}Load of every expert at the end", _experts_of(curves)))
    return panels


def _loss(figure: Figure, axis: Axes, runs: Sequence[Curves]) -> None:
    # Of several runs it is said once.
    validation = "validation" if len(runs) == 1 else "validation, darker"
    diverged = "not a number"
    for curves in runs:
        (line,) = _line(axis, curves.loss, label=_label(curves, runs, "training"), marker=".")
        if curves.valid:
            at = sorted(curves.valid)
            values = [number(curves.valid[i]) for i in at]
            axis.plot(
                at, values, "o-", markersize=4, linewidth=1, color=_darker(line.get_color()),
                label=validation,
            )  # fmt: skip
            validation = ""
        if curves.diverged_at is not None:
            axis.axvline(curves.diverged_at, color="crimson", linestyle=":", label=diverged)
            diverged = ""
    axis.set_ylabel("loss (nats)")
    perplexity = axis.secondary_yaxis("right")
    low, high = axis.get_ylim()
    steps = (1, 2, 5) if high - low < 8 else (1,)  # nats: labels must not touch
    nice = [step * 10.0**e for e in range(-1, 9) for step in steps]
    ticks: list[float] = []
    for p in nice:
        apart = math.log(p / ticks[-1]) if ticks else math.inf
        if low <= math.log(p) <= high and apart > (high - low) / _NUMBERS:
            ticks.append(p)
    ticks = ticks or [math.exp(min(low, 20))]
    perplexity.set_yticks([math.log(p) for p in ticks], [written(p) for p in ticks])
    perplexity.set_ylabel("perplexity")
    _finish(axis, legend=True)


def _speed(figure: Figure, axis: Axes, runs: Sequence[Curves]) -> None:
    from matplotlib.ticker import EngFormatter

    for curves in runs:
        _line(axis, curves.tokens_per_s, label=_label(curves, runs, ""), marker=".")
    axis.set_ylabel("tokens per second")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])  # however level a line, it is below the frame
    axis.yaxis.set_major_formatter(EngFormatter())
    _finish(axis, legend=len(runs) > 1)


def _grad_norm(figure: Figure, axis: Axes, runs: Sequence[Curves]) -> None:
    for curves in runs:
        _line(axis, curves.grad_norm, label=_label(curves, runs, ""), marker=".")
    axis.set_ylabel("gradient norm")
    # Where nothing is learned all are 0, which has no place on a logarithmic axis.
    if any(number(v) > 0 for curves in runs for v in curves.grad_norm.values()):
        axis.set_yscale("log")
        number_logarithmic(axis.yaxis)
    _finish(axis, legend=len(runs) > 1)


def _load_of(curves: Curves) -> Panel:
    def panel(figure: Figure, axis: Axes, runs: Sequence[Curves]) -> None:
        at = _thinned(sorted(curves.load_imbalance))
        layers = range(len(curves.load_imbalance[at[-1]]))
        grid = [[number(curves.load_imbalance[i][layer]) for i in at] for layer in layers]
        edges = [at[0] - (at[1] - at[0] if len(at) > 1 else 1), *at]  # an interval ends where it is
        mesh = axis.pcolormesh(
            edges, _around(layers), grid, cmap="viridis", vmin=1.0, rasterized=True
        )
        figure.colorbar(mesh, cax=axis.inset_axes(_BESIDE), label="max / mean")
        _layers_on_y(axis, layer_names(curves.start, len(layers)))
        _whole_on_x(axis, "iteration")

    return panel


def _experts_of(curves: Curves) -> Panel:
    def panel(figure: Figure, axis: Axes, runs: Sequence[Curves]) -> None:
        from matplotlib.colors import TwoSlopeNorm

        counts = curves.tokens_per_expert[max(curves.tokens_per_expert)]
        grid = [[n * len(row) / max(sum(row), 1.0) for n in row] for row in counts]
        experts = range(len(grid[0]))
        top = max(2.0, *(max(row) for row in grid))
        mesh = axis.pcolormesh(
            _around(experts), _around(range(len(grid))), grid, cmap="coolwarm",
            norm=TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top), rasterized=True,
        )  # fmt: skip
        figure.colorbar(mesh, cax=axis.inset_axes(_BESIDE), label="load / mean")
        _layers_on_y(axis, layer_names(curves.start, len(grid)))
        _whole_on_x(axis, "expert")

    return panel


def _line(axis: Axes, series: Mapping[int, float | None], **style: Any) -> list[Any]:
    at = sorted(series)
    values = [number(series[i]) for i in at]
    if len(at) > _MARKED:
        style.pop("marker", None)
    if len(at) <= _POINTS:
        return axis.plot(at, values, linewidth=1, **style)
    step = -(-len(at) // _POINTS)
    chunks = [_numbers(values[i : i + step]) for i in range(0, len(at), step)]
    places = [at[min(i + step, len(at)) - 1] for i in range(0, len(at), step)]
    lines = axis.plot(places, [sum(c) / len(c) for c in chunks], linewidth=1, **style)
    axis.fill_between(
        places, [min(c) for c in chunks], [max(c) for c in chunks],
        color=lines[0].get_color(), alpha=0.25, linewidth=0,
    )  # fmt: skip
    return lines


def _numbers(values: list[float]) -> list[float]:
    """Those of a stretch that are: one step that was skipped does not hide a thousand others."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def _thinned(at: list[int]) -> list[int]:
    step = -(-len(at) // _POINTS)
    return at[::-1][::step][::-1]


def _around(cells: range) -> list[float]:
    return [cell - 0.5 for cell in range(len(cells) + 1)]


def _layers_on_y(axis: Axes, names: list[str]) -> None:
    at = range(0, len(names), -(-len(names) // _NUMBERS))
    axis.set_yticks(at, [names[row].removeprefix("layer ") for row in at])
    axis.set_ylabel("layer")
    axis.invert_yaxis()


def _whole_on_x(axis: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel(label)
    axis.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _finish(axis: Axes, *, legend: bool = False) -> None:
    _whole_on_x(axis, "iteration")
    low, high = axis.get_xlim()
    if high - low < 1:  # of a single step, around which there are no whole numbers
        axis.set_xlim(low - 1, high + 1)
    axis.grid(alpha=0.3)
    if legend:
        named = len(axis.get_legend_handles_labels()[1])
        size = "medium" if named <= 3 else "x-small"
        axis.legend(fontsize=size, ncols=max(-(-named // _NAMES), 1))


def _label(curves: Curves, runs: Sequence[Curves], what: str) -> str:
    return what if len(runs) == 1 else _name(curves, runs)


def _name(curves: Curves, runs: Sequence[Curves]) -> str:
    """A run's name as it is drawn, shortened if it still is no other run's."""
    short = _shortened(curves.name)
    alone = sum(_shortened(other.name) == short for other in runs) == 1
    return drawn_name(short if alone else curves.name)


def _shortened(name: str) -> str:
    """Of a long name, a path say, the beginning and the end."""
    if len(name) <= _LETTERS:
        return name
    return f"{name[: _LETTERS // 3]}\N{HORIZONTAL ELLIPSIS}{name[-(_LETTERS * 2 // 3) :]}"


def drawn_name(name: str) -> str:
    """A run's name as matplotlib draws it: else dollars enclose formulas, and a legend leaves out
    what begins with _."""
    name = printable(name).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def _darker(color: str) -> Any:
    from matplotlib.colors import to_rgb

    return tuple(0.6 * part for part in to_rgb(color))


def figure_of(panels: Sequence[tuple[str, Panel]], runs: Sequence[Curves], height: float) -> Figure:
    """Panels one below the other.

    The margins are fixed: a layout that computes them takes as long as the drawing.
    """
    from cycler import cycler
    from matplotlib import rc_context, rcParams
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height))
    figure.subplots_adjust(0.09, 0.5 / height, 0.87, 1 - 0.35 / height, hspace=0.45)
    styles = cycler(linestyle=["-", "--", ":", "-."]) * rcParams["axes.prop_cycle"]
    with rc_context({"font.family": families()}):
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axis, (title, panel) in zip(axes, panels, strict=True):
            axis.set_prop_cycle(styles)  # more runs than there are colours
            axis.set_title(title, loc="left", fontsize="medium")
            panel(figure, axis, runs)
    return figure
