"""What every model returns, whole or as one stage of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ModelOutput(NamedTuple):
    """Letters: B sequences, S tokens, D hidden, L the Mixture-of-Experts layers of this part.

    x: hidden states [B, S, D] for the next stage, or those of a decoder and of its encoder; None
        where the model ends.
    losses: fp32 scalars by name, each summed with the weights that the batch gives its terms; {}
        where the model does not end. What is trained on is their sum, to which some have a smaller
        gradient than their number says, see `of_weight`.
    aux_loss: fp32 scalar, this part's share of the mean over all MoE layers of their weighted
        auxiliary losses; None without such layers.
    metrics: detached, each [L, ...] in the order of the layers; {} without such layers.
    """

    x: Tensor | tuple[Tensor, Tensor] | None
    losses: dict[str, Tensor]
    aux_loss: Tensor | None
    metrics: dict[str, Tensor]

    def total(self) -> Tensor:
        """What to call backward on: all losses and the auxiliary one."""
        parts = [*self.losses.values(), *([] if self.aux_loss is None else [self.aux_loss])]
        return torch.stack([part.reshape(()) for part in parts]).sum()


def of_weight(loss: Tensor, weight: float) -> Tensor:
    """A loss that is told as it is, and that trains with a weight: its gradient is multiplied."""
    return torch.lerp(loss.detach(), loss, weight)


class ExpertReports:
    """Collects what the blocks of a forward pass say of their experts.

    Args:
        num_moe_layers: of the whole model, over all stages.
    """

    def __init__(self, num_moe_layers: int) -> None:
        self._num_moe_layers = num_moe_layers
        self._aux_losses: list[Tensor] = []
        self._metrics: list[dict[str, Tensor]] = []

    @classmethod
    def joined(cls, *parts: ExpertReports) -> ExpertReports:
        """The reports of several stacks as of one, in their order."""
        whole = cls(sum(part._num_moe_layers for part in parts))
        for part in parts:
            whole._aux_losses += part._aux_losses
            whole._metrics += part._metrics
        return whole

    def add(self, aux_loss: Tensor | None, metrics: dict[str, Tensor]) -> None:
        """Note one block's; a dense block has none."""
        if aux_loss is not None:
            self._aux_losses.append(aux_loss)
            self._metrics.append(metrics)

    def output(
        self, x: Tensor | tuple[Tensor, Tensor] | None, losses: dict[str, Tensor]
    ) -> ModelOutput:
        """The model's output."""
        if not self._aux_losses:
            return ModelOutput(x, losses, None, {})
        stacked = {
            key: torch.stack([layer[key] for layer in self._metrics]) for key in self._metrics[0]
        }
        aux_loss = torch.stack(self._aux_losses).sum() / self._num_moe_layers
        return ModelOutput(x, losses, aux_loss, stacked)
