"""What a run measures and how it says so: Megatron's log lines, and a JSON Lines log.

Losses and expert loads stay on the device and are added up there; once per log interval they
travel to the host in one transfer, summed over ranks by one all-reduce. The lines are Megatron-LM's
digit for digit, so that its parsers read them; what Megatron has no field for is on a line of its
own.

Letters: L layers, E experts.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from mb_parallel import world_size
from torch import Tensor

_LAYER_MEANS = ("load_balancing_loss", "z_loss", "dropped_fraction", "router_entropy")


@dataclass
class IntervalStats:
    """Host-side averages since the last report, equal on all ranks."""

    lm_losses: list[float]  # one per iteration
    grad_norm: float
    params_norm: float | None
    layer_means: dict[str, list[float]] = field(default_factory=dict)  # per layer
    tokens_per_expert: list[list[float]] = field(default_factory=list)  # [L][E], sums

    @property
    def lm_loss(self) -> float:
        """Mean over the interval."""
        return sum(self.lm_losses) / len(self.lm_losses)

    @property
    def nan_iterations(self) -> int:
        """Iterations whose loss was not a number."""
        return sum(math.isnan(loss) for loss in self.lm_losses)

    def mean(self, key: str) -> float:
        """Mean over layers of a per-layer value; 0 for a dense model."""
        values = self.layer_means.get(key, [0.0])
        return sum(values) / len(values)

    @property
    def load_imbalance(self) -> list[float]:
        """Per layer: tokens of the fullest expert over the mean, 1 when balanced."""
        return [max(row) * len(row) / max(sum(row), 1.0) for row in self.tokens_per_expert]


class Accumulator:
    """Adds up on the device; `collect` brings everything to the host at once."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.losses: list[Tensor] = []
        self.passes = 0
        self.counts_LE: Tensor | None = None
        self.sums: dict[str, Tensor] = {}

    def add_pass(self, metrics: dict[str, Tensor]) -> None:
        """Add one forward pass: its MoE metrics, each [L] or [L, E]; {} for a dense model."""
        self.passes += 1
        if not metrics:
            return
        counts_LE = metrics["tokens_per_expert"]
        if self.counts_LE is None:
            self.counts_LE = counts_LE.double()
        else:
            self.counts_LE += counts_LE
        for key in _LAYER_MEANS:
            value_L = metrics[key].double()
            self.sums[key] = self.sums[key] + value_L if key in self.sums else value_L

    def add_iteration(self, lm_loss: Tensor) -> None:
        """Add this rank's mean loss of one step."""
        self.losses.append(lm_loss)

    def collect(self, grad_norm: Tensor, params_norm: Tensor | None = None) -> IntervalStats:
        """Average over ranks and passes, transfer, and start anew."""
        parts = [torch.stack(self.losses).double()]
        parts += [self.sums[key].flatten() for key in self.sums]
        if self.counts_LE is not None:
            parts.append(self.counts_LE.flatten())
        device = parts[0].device
        summed = torch.cat(parts)
        if world_size() > 1:
            dist.all_reduce(summed)
        alike = [grad_norm] if params_norm is None else [grad_norm, params_norm]
        alike = [value.double().reshape(1).to(device) for value in alike]
        values = torch.cat([summed, *alike]).tolist()
        stats = self._unpack(values, has_params_norm=params_norm is not None)
        self._clear()
        return stats

    def _unpack(self, values: list[float], *, has_params_norm: bool) -> IntervalStats:
        params_norm = values.pop() if has_params_norm else None
        grad_norm = values.pop()
        ranks, iterations = world_size(), len(self.losses)
        stats = IntervalStats([v / ranks for v in values[:iterations]], grad_norm, params_norm)
        at = iterations
        for key, total in self.sums.items():
            size = total.numel()
            stats.layer_means[key] = [v / (ranks * self.passes) for v in values[at : at + size]]
            at += size
        if self.counts_LE is not None:
            layers, experts = self.counts_LE.shape
            for layer in range(layers):
                start = at + layer * experts
                stats.tokens_per_expert.append(values[start : start + experts])
        return stats


def train_line(
    iteration: int,
    iterations: int,
    *,
    consumed_samples: int,
    elapsed_ms: float,
    lr: float,
    batch_size: int,
    losses: dict[str, float],
    grad_norm: float,
    params_norm: float | None,
    nan_iterations: int,
) -> str:
    """Megatron's progress line; `lr` is the rate of the next step, as there."""
    fields = [
        f" iteration {iteration:8d}/{iterations:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
        f"learning rate: {lr:.3E}",
        f"global batch size: {batch_size:5d}",
    ]
    fields += [f"{name}: {value:.6E}" for name, value in losses.items() if value > 0.0]
    fields += ["loss scale: 1.0", f"grad norm: {grad_norm:.3f}"]
    if params_norm is not None:
        fields.append(f"params norm: {params_norm:.3f}")
    fields += [
        f"number of skipped iterations: {0:3d}",
        f"number of nan iterations: {nan_iterations:3d}",
    ]
    return " | ".join(fields) + " |"


def validation_lines(place: str, losses: dict[str, float]) -> str:
    """Megatron's validation line between two rules; `place` is "iteration 100", say."""
    line = f" validation loss at {place} | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """exp of a loss in nats, capped as in Megatron."""
    return math.exp(min(20.0, loss))


def extra_line(tokens_per_s: float, stats: IntervalStats) -> str:
    """What Megatron's line has no field for."""
    line = f"  tokens per second: {tokens_per_s:,.0f}"
    if stats.tokens_per_expert:
        loads = stats.load_imbalance
        worst = max(range(len(loads)), key=loads.__getitem__)
        line += (
            f" | expert load max/mean: {sum(loads) / len(loads):.2f}"
            f" (layer {worst}: {loads[worst]:.2f})"
            f" | dropped: {100 * stats.mean('dropped_fraction'):.1f} %"
            f" | router entropy: {stats.mean('router_entropy'):.3f}"
        )
    return line


class RunLog:
    """Appends events to RUN/log.jsonl; a run without a folder, or another rank, writes none."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")

    def write(self, event: str, **values: Any) -> None:
        """Append one object; not-a-number becomes null, so that every JSON reader takes it."""
        if self._file is not None:
            record = {"event": event, **values}
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_log(path: Path) -> list[dict[str, Any]]:
    """Events of a log; a line cut short by a kill at the end is left out.

    Raises:
        ValueError: a broken line in the middle.
    """
    events = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is no JSON.") from None
    return events
