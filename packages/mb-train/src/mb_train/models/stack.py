"""A stack of blocks and the norm that ends it, whole or a stage's share of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Norm
from mb_train.models.output import ExpertReports
from mb_train.models.transformer import Block, BlockOutput


class Stack(nn.Module):
    """Blocks one after the other.

    Args:
        config: sizes and choices.
        cross: every block attends to an encoder as well.
        compute_dtype: of the activations; with `fp32_residual` what comes out of the norm is cast
            to it.

    Attributes:
        blocks: by number ("0" to "L-1") in the whole stack, each a unit of sharding.
        norm: None on all stages but the last, and for norms behind sums.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        cross: bool = False,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.narrow = compute_dtype if config.fp32_residual else None
        layers = range(config.num_layers)
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(config, layer, cross=cross, compute_dtype=compute_dtype)
                for layer in layers
            }
        )
        self.norm: Norm | None = None if config.norms == "sum" else Norm(config)
        self.ends = True
        self.num_moe_layers = sum(map(config.has_experts, layers))

    def keep(self, layers: range, *, last: bool) -> None:
        """Cut the stack down to these blocks; the norm stays with the last of them."""
        for name in list(self.blocks):
            if int(name) not in layers:
                del self.blocks[name]
        self.ends = last
        if not last:
            self.norm = None

    def forward(
        self, x_BSD: Tensor, context: BlockContext, cross_context: BlockContext | None = None
    ) -> tuple[Tensor, ExpertReports]:
        """Hidden states in x's shape, normed if this is the end; what the experts report."""
        reports = ExpertReports(self.num_moe_layers)
        if self.narrow is not None:
            x_BSD = x_BSD.float()
        for block in self.blocks.values():
            output: BlockOutput = block(x_BSD, context, cross_context)
            x_BSD = output.x_BSD
            reports.add(output.aux_loss, output.metrics)
        if not self.ends:
            return x_BSD, reports
        x_BSD = x_BSD if self.norm is None else self.norm(x_BSD)
        return x_BSD if self.narrow is None else x_BSD.to(self.narrow), reports
