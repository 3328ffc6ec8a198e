"""What a step's load of the experts moves: balancing biases, and which rank holds which experts.

Biases (arXiv 2408.15664) move once per step, by the load it saw. Experts change places every
`--moe-rebalance-interval` steps, by the load of that step alone: a run that is resumed moves the
same ones.

Letters: L Mixture-of-Experts layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from mb_layers import update_balancing_bias
from mb_layers.moe import MoELayer
from mb_parallel import ParallelMesh, of_all_ranks, rebalance_experts
from mb_parallel.pipeline_parallel import stage_indices
from torch import Tensor, nn

from mb_train.config import TrainConfig
from mb_train.words import counted


class Changed(NamedTuple):
    """Experts that changed places: what is said of it; by row of the metrics, which is which now.

    Of `orders`, expert i is the one that was order[i].
    """

    said: str
    orders: dict[int, tuple[int, ...]]


class LoadBalance:
    """Counts a step's tokens per expert, and evens out this rank's layers by them.

    Args:
        parts: the stages on this rank.
        config: the run; its rate of the biases' update, its interval of new places.
        mesh: whose data-parallel ranks hold copies of the routers.
    """

    def __init__(self, parts: Sequence[nn.Module], config: TrainConfig, mesh: ParallelMesh) -> None:
        self._rate = config.moe_router_bias_update_rate
        self._interval = config.moe_rebalance_interval
        self._parts, self._mesh = parts, mesh
        self._layers = [
            {name: m for name, m in part.named_modules() if isinstance(m, MoELayer)}
            for part in parts
        ]
        self._rows = _rows(self._layers, config, mesh)
        self._counts_LE: Tensor | None = None

    def see(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one forward pass's metrics."""
        if "tokens_per_expert" in metrics:
            counts_LE = metrics["tokens_per_expert"]
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    @torch.no_grad()
    def update(self, step: int, optimizer: torch.optim.Optimizer) -> Changed | None:
        """After step number `step`: even out, count anew; what has changed, on any stage."""
        counts_LE, self._counts_LE = self._counts_LE, None
        if counts_LE is None:
            return None
        rows = apart = len(counts_LE)
        if self._mesh.pp_size == 1:  # an ICT of one tower runs it twice
            apart = len(self._rows)
            counts_LE = counts_LE.unflatten(0, (-1, apart)).sum(0)
        self._move_biases(counts_LE)
        if not self._interval or step % self._interval:
            return None
        moved = {}
        for part, layers in zip(self._parts, self._layers, strict=True):
            loads = {name: counts_LE[self._rows[name]] for name in layers}
            for layer in rebalance_experts(part, loads, self._mesh, optimizer=optimizer):
                moved[self._rows[layer.layer]] = layer
        axis = self._mesh.axis("pp")
        if axis is not None:  # one rank speaks for all stages, and metrics are of all
            stages = of_all_ranks(moved, axis.get_group())
            moved = {row: layer for stage in stages for row, layer in stage.items()}
        if not moved:
            return None
        before = max(layer.before for layer in moved.values())
        after = max(layer.after for layer in moved.values())
        return Changed(
            f" experts of {counted(len(moved), 'layer')} changed places after step {step}: the "
            f"fullest rank had {before:.2f} times an even share, as they are now {after:.2f}",
            {at: layer.order for row, layer in moved.items() for at in range(row, rows, apart)},
        )

    def _move_biases(self, counts_LE: Tensor) -> None:
        biased = [
            (self._rows[name], layer.router)
            for layers in self._layers
            for name, layer in layers.items()
            if layer.router.balancing_bias is not None
        ]
        if not biased:
            return
        counts_LE = self._mesh.all_reduce(counts_LE.clone(), "dp")
        for row, router in biased:
            update_balancing_bias(router, counts_LE[row], rate=self._rate)


def _rows(
    layers: Sequence[Mapping[str, MoELayer]], config: TrainConfig, mesh: ParallelMesh
) -> dict[str, int]:
    """Which row of the metrics is a layer's, by name: they are of all stages, in their order."""
    indices = stage_indices(
        config.schedule_in_force,
        pp_size=mesh.pp_size,
        pp_rank=mesh.pp_rank,
        stages_per_rank=len(layers),
    )
    mine = {index: list(names) for index, names in zip(indices, layers, strict=True)}
    axis = mesh.axis("pp")
    ranks = [mine] if axis is None else of_all_ranks(mine, axis.get_group())
    stages = {index: names for of_rank in ranks for index, names in of_rank.items()}
    ordered = [name for index in sorted(stages) for name in stages[index]]
    return {name: row for row, name in enumerate(ordered)}
