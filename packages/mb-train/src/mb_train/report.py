"""The picture of a run: losses, throughput and expert load from its log.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mb_train.reporting import read_log
from mb_train.run_folder import LOG_FILE, PICTURE


@dataclass
class Curves:
    """A run's measurements by iteration; where a run was resumed the later record holds."""

    loss: dict[int, float | None] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    load_imbalance: dict[int, list[float]] = field(default_factory=dict)  # per layer


def read_curves(folder: Path) -> Curves:
    """Read RUN/log.jsonl.

    Raises:
        ValueError: no log there, or nothing in it.
    """
    path = folder / LOG_FILE
    if not path.is_file():
        raise ValueError(f"Expected {folder} to be a run folder with a {LOG_FILE}, found none.")
    curves = Curves()
    for event in read_log(path):
        if event["event"] == "start":
            _forget_after(curves, event["iteration"])
        elif event["event"] == "train":
            _add_interval(curves, event)
        elif event["event"] == "eval" and "test" not in event["place"]:
            curves.valid[event["iteration"]] = event["lm_loss"]
    if not curves.loss:
        raise ValueError(f"{path} holds no training step yet.")
    return curves


def _forget_after(curves: Curves, iteration: int) -> None:
    """A run that went on from `iteration` replaces what an earlier one did after it."""
    for series in (curves.loss, curves.valid, curves.tokens_per_s, curves.load_imbalance):
        for later in [i for i in series if i > iteration]:
            del series[later]


def _add_interval(curves: Curves, event: dict[str, Any]) -> None:
    last, losses = event["iteration"], event["lm_losses"]
    for offset, loss in enumerate(losses):
        curves.loss[last - len(losses) + 1 + offset] = loss
    curves.tokens_per_s[last] = event["tokens_per_s"]
    if event["load_imbalance"]:
        curves.load_imbalance[last] = event["load_imbalance"]


def draw(folder: Path) -> Path:
    """Draw RUN/loss.png from RUN/log.jsonl; returns its path.

    Raises:
        ValueError: no log, or an empty one.
        ModuleNotFoundError: matplotlib is missing.
    """
    curves = read_curves(folder)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = 3 if curves.load_imbalance else 2
    figure = Figure(figsize=(8, 2.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True)
    iterations = sorted(curves.loss)
    values = [_number(curves.loss[i]) for i in iterations]
    axes[0].plot(iterations, values, linewidth=1, label="training")
    if curves.valid:
        at = sorted(curves.valid)
        axes[0].plot(at, [curves.valid[i] for i in at], "o-", label="validation")
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend()
    at = sorted(curves.tokens_per_s)
    axes[1].plot(at, [curves.tokens_per_s[i] for i in at], ".-", linewidth=1)
    axes[1].set_ylabel("tokens per second")
    axes[1].set_ylim(bottom=0)
    if curves.load_imbalance:
        at = sorted(curves.load_imbalance)
        for layer in range(len(curves.load_imbalance[at[0]])):
            loads = [curves.load_imbalance[i][layer] for i in at]
            axes[2].plot(at, loads, linewidth=1, label=f"layer {layer}")
        axes[2].axhline(1.0, color="grey", linewidth=0.5)
        axes[2].set_ylabel("expert load, max / mean")
        if len(curves.load_imbalance[at[0]]) <= 8:
            axes[2].legend()
    axes[-1].set_xlabel("iteration")
    for axis in axes:
        axis.grid(alpha=0.3)
    path = folder / PICTURE
    draft = path.with_name(f"{path.stem}.partial.png")
    figure.savefig(draft, dpi=120)
    os.replace(draft, path)
    return path


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def summary(folder: Path) -> str:
    """A few lines about a run: where its loss went, how fast, how balanced."""
    curves = read_curves(folder)
    first, last = min(curves.loss), max(curves.loss)
    lines = [
        f"iterations {first} to {last}: training loss {_number(curves.loss[first]):.4f} -> "
        f"{_number(curves.loss[last]):.4f}"
    ]
    if curves.valid:
        at = max(curves.valid)
        lines.append(f"validation loss at iteration {at}: {curves.valid[at]:.4f}")
    speeds = sorted(curves.tokens_per_s.values())
    lines.append(f"tokens per second, median: {speeds[len(speeds) // 2]:,.0f}")
    if curves.load_imbalance:
        loads = curves.load_imbalance[max(curves.load_imbalance)]
        lines.append("expert load max/mean by layer: " + " ".join(f"{load:.2f}" for load in loads))
    return "\n".join(lines)
