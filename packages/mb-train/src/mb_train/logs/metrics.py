"""What a run measures: losses and the load of its experts, added up on the device.

Once per log interval the sums travel to the host in one transfer, after they were added up over the
data-parallel ranks; a pipeline's passes measure the layers of all its stages. No step waits for the
device.

Letters: L layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from mb_parallel import ParallelMesh
from torch import Tensor

_LAYER_LOSSES = ("load_balancing_loss", "z_loss")
# Means over tokens: passes of few, most of them padding, do not weigh as much as others.
_TOKEN_MEANS = ("dropped_fraction", "router_entropy")


@dataclass
class IntervalStats:
    """Host-side averages since the last report, equal on all ranks."""

    losses: dict[str, list[float]]  # by name, one per iteration; a task's main loss is its first
    grad_norm: float
    params_norm: float | None = None
    zeros_in_grad: float | None = None
    skipped: list[bool] = field(default_factory=list)  # one per iteration
    stuck: list[bool] = field(default_factory=list)  # skipped, and no lower loss scale to try
    # Per layer: of losses over passes, as `loss` over steps; of all else over tokens.
    layer_means: dict[str, list[float]] = field(default_factory=dict)
    tokens_per_expert: list[list[float]] = field(default_factory=list)  # [L][E], sums

    @property
    def lm_losses(self) -> list[float]:
        """The main loss of each iteration."""
        return next(iter(self.losses.values()))

    def loss(self, name: str) -> float:
        """Mean over the iterations that were not skipped, as Megatron has it; 0 if all were."""
        pairs = zip(self.losses[name], self.skipped, strict=True)
        kept = [loss for loss, skipped in pairs if not skipped]
        return sum(kept) / max(len(kept), 1)

    @property
    def nan_iterations(self) -> int:
        """Iterations of which a loss was not a number, or infinite, as Megatron counts them."""
        steps = zip(*self.losses.values(), strict=True)
        return sum(not all(map(math.isfinite, losses)) for losses in steps)

    @property
    def skipped_iterations(self) -> int:
        """Iterations whose update was skipped."""
        return sum(self.skipped)

    def mean(self, key: str) -> float:
        """Mean over layers of a per-layer value; 0 for a dense model."""
        values = self.layer_means.get(key, [0.0])
        return sum(values) / len(values)

    @property
    def load_imbalance(self) -> list[float]:
        """Per layer: tokens of the fullest expert over the mean, 1 when balanced."""
        return [max(row) * len(row) / max(sum(row), 1.0) for row in self.tokens_per_expert]


class Accumulator:
    """Adds up on the device; `collect` brings everything to the host at once.

    Args:
        mesh: over whose ranks the sums go.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._clear()

    def _clear(self) -> None:
        self._losses: dict[str, list[Tensor]] = {}
        self._skipped: list[Tensor] = []
        self._stuck: list[Tensor] = []
        self._passes: list[int] = []  # of each step
        self._counts_LE: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._passes_of_step = 0
        self._sums_of_step: dict[str, Tensor] = {}

    def add_pass(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one forward pass of a step: its MoE metrics, [L] or [L, E]; {} for a dense model."""
        self._passes_of_step += 1
        if not metrics:
            return
        counts_LE = metrics["tokens_per_expert"].double()
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE
        slots_L = counts_LE.sum(1)  # of a token as many as of any other
        for key in _LAYER_LOSSES:
            _add(self._sums_of_step, key, metrics[key].double())
        for key in _TOKEN_MEANS:
            _add(self._sums_of_step, key, metrics[key].double() * slots_L)

    def renumber(self, orders: Mapping[int, Sequence[int]]) -> None:
        """Count by experts' new numbers from here on, and what was counted too.

        Args:
            orders: by row of the counts: expert i is the one that was order[i].
        """
        assert self._counts_LE is not None
        for row, order in orders.items():
            counts_E = self._counts_LE[row]
            counts_E[: len(order)] = counts_E[list(order)]

    def add_iteration(
        self,
        losses: Mapping[str, Tensor],
        skipped: Tensor | None = None,
        *,
        stuck: Tensor | None = None,
    ) -> None:
        """Add one step, after its passes.

        Args:
            losses: of this data-parallel rank, scalars whose sum over those ranks is the loss.
            skipped: whether the update was skipped, a scalar; None means not.
            stuck: whether it was though no lower loss scale is left to try; None: if skipped.
        """
        for name, loss in losses.items():
            self._losses.setdefault(name, []).append(loss)
        if skipped is None:
            skipped = torch.zeros((), device=next(iter(losses.values())).device)
        self._skipped.append(skipped)
        self._stuck.append(skipped if stuck is None else stuck)
        for key, value_L in self._sums_of_step.items():
            if key in _LAYER_LOSSES:  # 0 times infinity would be no number
                value_L = torch.where(skipped.to(value_L.device) != 0, 0.0, value_L)
            _add(self._sums, key, value_L)
        self._passes.append(self._passes_of_step)
        self._begin_step()

    def collect(
        self,
        grad_norm: Tensor,
        params_norm: Tensor | None = None,
        zeros_in_grad: Tensor | None = None,
    ) -> IntervalStats:
        """Average over ranks and passes, transfer, and start anew.

        Args:
            grad_norm, params_norm, zeros_in_grad: of the last step, equal on all ranks; None was
                not asked for.
        """
        shared = [torch.stack(values).double() for values in self._losses.values()]
        shared += [self._sums[key].flatten() for key in self._sums]
        if self._counts_LE is not None:
            shared.append(self._counts_LE.flatten())
        summed = torch.cat(shared)
        # Tensor-parallel ranks have the same numbers: a layer reports of all their tokens.
        self._mesh.all_reduce(summed, "dp")
        more = {"params_norm": params_norm, "zeros_in_grad": zeros_in_grad}
        asked = {name: value for name, value in more.items() if value is not None}
        alike = [grad_norm, *self._skipped, *self._stuck, *asked.values()]
        alike = [value.double().reshape(1).to(summed.device) for value in alike]
        values = torch.cat([summed, *alike]).tolist()
        stats = self._unpack(values, list(asked))
        self._clear()
        return stats

    def _unpack(self, values: list[float], asked: list[str]) -> IntervalStats:
        place = 0

        def take(count: int) -> list[float]:
            nonlocal place
            place += count
            return values[place - count : place]

        losses = {name: take(len(parts)) for name, parts in self._losses.items()}
        sums = {key: take(value.numel()) for key, value in self._sums.items()}
        counts: list[list[float]] = []
        if self._counts_LE is not None:
            layers, experts = self._counts_LE.shape
            counts = [take(experts) for _ in range(layers)]
        (grad_norm,) = take(1)
        skipped = [value != 0 for value in take(len(self._skipped))]
        stuck = [value != 0 for value in take(len(self._stuck))]
        taken = sum(n for n, left_out in zip(self._passes, skipped, strict=True) if not left_out)
        passes = self._mesh.dp_size * max(taken, 1)
        slots_L = [max(sum(row), 1.0) for row in counts]
        means = {
            key: [
                value / (passes if key in _LAYER_LOSSES else slots)
                for value, slots in zip(values_L, slots_L, strict=True)
            ]
            for key, values_L in sums.items()
        }
        more = dict(zip(asked, take(len(asked)), strict=True))
        return IntervalStats(
            losses,
            grad_norm,
            skipped=skipped,
            stuck=stuck,
            layer_means=means,
            tokens_per_expert=counts,
            **more,
        )


def _add(sums: dict[str, Tensor], key: str, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value
