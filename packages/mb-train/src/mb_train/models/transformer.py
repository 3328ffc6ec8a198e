"""Transformer blocks, written once for GPT, BERT and T5: norms, attention, feed-forward.

Parameters are fp32 and each layer casts its weights to the dtype of what it is given, so one text
serves three cases: fp32; 16-bit activations over fp32 master weights (the cast's backward brings
gradients back to fp32, where they accumulate); and FSDP2, whose gathered weights are in the compute
dtype already. Norms compute in fp32.

Nothing here knows of parallelism. The number of heads follows from the width of what the fused
projection returns, and its rows are ordered by key-value group, so a tensor-parallel shard of the
weight is whole heads and the same text computes with them.

Letters: B sequences, S tokens of a sequence, D hidden, H query heads, G key-value heads (groups of
query heads), C width of a head, F ffn width, E experts, L layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from mb_kernels.activation import activate, activate_gated, is_glu
from mb_layers import (
    ExpertChoiceRouter,
    MoE,
    NoisyTopKRouter,
    SinkhornRouter,
    SparseMixerRouter,
    dMoE,
)
from torch import Tensor, nn

from mb_train.models.attention import Attention, BlockContext
from mb_train.models.config import TransformerConfig
from mb_train.models.delta_net import GatedDeltaNet
from mb_train.models.gated_convolution import GatedConvolution
from mb_train.models.latent import LatentAttention
from mb_train.models.linear import Linear, Norm
from mb_train.models.mamba import Mamba2

# By `TransformerConfig.router`, where it is not the layer's own.
_ROUTERS = {
    "noisy_topk": NoisyTopKRouter,
    "sinkhorn": SinkhornRouter,
    "sparsemixer": SparseMixerRouter,
    "expert_choice": ExpertChoiceRouter,
}


class DenseMLP(nn.Module):
    """A dense feed-forward, x_BSD to y_BSD; a gated activation has a map `gate` beside `up`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.ffn_size)
        self.activation = config.activation
        self.gate = None
        if is_glu(config.activation):
            self.gate = Linear(*sizes, std=config.init_std, bias=config.bias)
        self.up = Linear(*sizes, std=config.init_std, bias=config.bias)
        self.down = Linear(*reversed(sizes), std=config.output_init_std, bias=config.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.up(x_BSD), self.activation))
        return self.down(activate_gated(self.gate(x_BSD), self.up(x_BSD), self.activation))


class BlockOutput(NamedTuple):
    """x_BSD; of a Mixture-of-Experts its weighted auxiliary loss and its metrics (None, {})."""

    x_BSD: Tensor
    aux_loss: Tensor | None
    metrics: dict[str, Tensor]


class Block(nn.Module):
    """x + f(norm(x)) for attention, then for the feed-forward; with `cross` a third in between.

    Of a model with a `pattern` it is but one of the two.

    The norms may also stand elsewhere, see `TransformerConfig.norms`. The experts' own output is
    let go of: it need not live until the loss.

    The sum over the blocks is in the dtype of what comes in; with `fp32_residual` f takes and gives
    `compute_dtype` all the same.

    Args:
        config: sizes and choices.
        layer: this block's number in the model, from 0.
        cross: attend to an encoder's output between the two halves (T5's decoder).
        compute_dtype: of the activations, where the residual stream has one of its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        *,
        cross: bool = False,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.norms, both = config.norms, config.norms == "both"
        self.narrow = compute_dtype if config.fp32_residual else None
        self.multiplier = config.residual_multiplier
        mixes, feeds = config.has_mixer(layer), config.has_feed_forward(layer)
        self.norm_1 = Norm(config) if mixes else None
        self.norm_1_out = Norm(config) if mixes and both else None
        if cross and config.latent is not None:
            raise ValueError("Expected no latent sizes in blocks that attend to an encoder.")
        self.attention = _mixer(config, layer) if mixes else None
        self.norm_cross = Norm(config) if cross else None
        self.norm_cross_out = Norm(config) if cross and both else None
        self.cross = Attention(config, rotates=False, cross=True) if cross else None
        self.norm_2 = Norm(config) if feeds else None
        self.norm_2_out = Norm(config) if feeds and both else None
        self.mlp = _feed_forward(config, layer) if feeds else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        for module in self.modules():
            if isinstance(module, Linear):
                module.fp8 = config.in_fp8(layer) and not module.exact

    def forward(
        self, x_BSD: Tensor, context: BlockContext, cross_context: BlockContext | None = None
    ) -> BlockOutput:
        if self.attention is not None and self.norm_1 is not None:
            x_BSD, z_BSD = self._before(self.norm_1, x_BSD)
            y_BSD = self.attention(z_BSD, context)
            x_BSD = self._after(self.norm_1, self.norm_1_out, x_BSD, y_BSD)
        if self.cross is not None and self.norm_cross is not None:
            assert cross_context is not None
            x_BSD, z_BSD = self._before(self.norm_cross, x_BSD)
            y_BSD = self.cross(z_BSD, cross_context)
            x_BSD = self._after(self.norm_cross, self.norm_cross_out, x_BSD, y_BSD)
        if self.mlp is None or self.norm_2 is None:
            return BlockOutput(x_BSD, None, {})
        x_BSD, z_BSD = self._before(self.norm_2, x_BSD)
        if isinstance(self.mlp, DenseMLP):
            x_BSD = self._after(self.norm_2, self.norm_2_out, x_BSD, self.mlp(z_BSD))
            return BlockOutput(x_BSD, None, {})
        output = self.mlp(z_BSD, mask=context.valid_BS)
        x_BSD = self._after(self.norm_2, self.norm_2_out, x_BSD, output.y)
        return BlockOutput(x_BSD, output.aux_loss, output.metrics)

    def _before(self, norm: Norm, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """What a half of the block is added to, and what it computes with."""
        z_BSD = norm(x_BSD) if self.norms in ("before", "kept", "both") else x_BSD
        x_BSD = z_BSD if self.norms == "kept" else x_BSD
        return x_BSD, z_BSD if self.narrow is None else z_BSD.to(self.narrow)

    def _after(self, norm: Norm, norm_out: Norm | None, x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
        """What comes of the half of the block that put out y_BSD."""
        norm_out = norm if self.norms == "output" else norm_out
        y_BSD = self.dropout(y_BSD if norm_out is None else norm_out(y_BSD))
        x_BSD = x_BSD + (y_BSD if self.multiplier == 1 else self.multiplier * y_BSD)
        return norm(x_BSD) if self.norms == "sum" else x_BSD


def _mixer(config: TransformerConfig, layer: int) -> nn.Module:
    """The half of a block in which tokens meet."""
    if config.has_mamba(layer):
        return Mamba2(config)
    if config.has_convolution(layer):
        return GatedConvolution(config)
    if config.has_state(layer):
        return GatedDeltaNet(config)
    if config.latent is not None:
        return LatentAttention(config)
    return Attention(config, window=config.window_of(layer), rotates=config.rotates(layer))


def _feed_forward(config: TransformerConfig, layer: int) -> nn.Module:
    """The half of a block that computes token by token."""
    if not config.has_experts(layer):
        return DenseMLP(config)
    assert config.moe is not None
    moe = config.moe
    if moe.fp8 != config.in_fp8(layer):
        moe = replace(moe, fp8=not moe.fp8)
    router = _ROUTERS[config.router](moe) if config.router in _ROUTERS else None
    return (dMoE if moe.capacity_factor is None else MoE)(moe, router=router)


def output_std(init_std: float, additions: int) -> float:
    """Init of the maps that add to the residual, so many of them: std / sqrt(2 L), as in GPT-2."""
    return init_std / math.sqrt(additions)
