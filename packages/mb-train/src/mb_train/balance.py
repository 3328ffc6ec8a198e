"""The balancing bias of the routers (arXiv 2408.15664), moved once per step by the load it saw.

Letters: L Mixture-of-Experts layers of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from mb_layers import Router, update_balancing_bias
from mb_parallel import ParallelMesh
from torch import Tensor, nn

from mb_train.config import TrainConfig, whole


class BalancingBias:
    """Counts a step's tokens per expert over all ranks, and moves the biases of this rank's layers.

    Args:
        parts: the stages on this rank.
        config: the run; its rate of the update.
        mesh: whose data-parallel ranks hold copies of the routers.
    """

    def __init__(self, parts: Sequence[nn.Module], config: TrainConfig, mesh: ParallelMesh) -> None:
        self._rate, self._mesh = config.moe_router_bias_update_rate, mesh
        found = {
            name: module
            for part in parts
            for name, module in part.named_modules()
            if isinstance(module, Router) and module.balancing_bias is not None
        }
        rows = range(len(found))
        if mesh.pp_size > 1:
            rows = [_row(name, config) for name in found]  # metrics are of all stages
        self._routers = list(zip(rows, found.values(), strict=True))
        self._counts_LE: Tensor | None = None

    def see(self, metrics: Mapping[str, Tensor]) -> None:
        """Add one forward pass's metrics."""
        if "tokens_per_expert" in metrics:
            counts_LE = metrics["tokens_per_expert"]
            self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by one step and count anew; nothing for routers without."""
        counts_LE, self._counts_LE = self._counts_LE, None
        if not self._routers or counts_LE is None:
            return
        counts_LE = self._mesh.all_reduce(counts_LE.clone(), "dp")
        for row, router in self._routers:
            update_balancing_bias(router, counts_LE[row], rate=self._rate)


def _row(name: str, config: TrainConfig) -> int:
    """How many layers with experts a router's layer has before it in the whole model.

    Its name holds the layer's number in its stack; a decoder's layers come behind the encoder's.
    """
    layer = int(name.split("blocks.")[1].split(".")[0])
    row = sum(map(config.has_experts, range(layer)))
    if name.startswith("decoder."):
        row += sum(map(config.has_experts, range(whole(config.num_layers))))
    return row
