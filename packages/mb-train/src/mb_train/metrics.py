"""What a run measures: losses and the load of its experts, added up on the device.

Once per log interval the sums travel to the host in one transfer, after one all-reduce over ranks;
no step waits for the device.

Letters: L layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
