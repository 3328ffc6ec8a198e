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
from torch import Tensor, nn

from mb_train.config import TrainConfig, whole
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
        names = [name for layers in self._layers for name in layers]
        rows = range(len(names))
        if mesh.pp_size > 1:
            rows = [_row(name, config) for name in names]  # metrics are of all stages
        self._rows = dict(zip(names, rows, strict=True))
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


def _row(name: str, config: TrainConfig) -> int:
    """How many layers with experts a layer has before it in the whole model.

    Its name holds the layer's number in its stack; a decoder's layers come behind the encoder's,
    and modules for further tokens behind all layers.
    """
    if name.startswith("mtp."):
        layers = whole(config.num_layers)
        return sum(map(config.has_experts, range(layers))) + int(name.split(".")[1])
    layer = int(name.split("blocks.")[1].split(".")[0])
    row = sum(map(config.has_experts, range(layer)))
    if name.startswith("decoder."):
        row += sum(map(config.has_experts, range(whole(config.num_layers))))
    return row
