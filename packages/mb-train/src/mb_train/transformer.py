"""Pre-LN transformer blocks: attention and a feed-forward, dense or Mixture-of-Experts.

Parameters are fp32 and each layer casts its weights to the dtype of what it is given, so one text
serves three cases: fp32; bf16 activations over fp32 master weights (the cast's backward brings
gradients back to fp32, where they accumulate); and FSDP2, whose gathered weights are in the compute
dtype already. Attention is torch's `scaled_dot_product_attention`, layer norm computes in fp32.

Letters: B sequences, S tokens of a sequence, D hidden, H heads, C width of a head, F ffn width,
E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mb_kernels
import torch.nn.functional as F
from mb_kernels.activation import activate
from mb_layers import MoE, MoEConfig, MoEOutput, dMoE
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What one block is built from; `moe` None makes its feed-forward dense."""

    hidden_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    activation: str
    attention_dropout: float
    hidden_dropout: float
    norm_eps: float
    init_std: float
    output_init_std: float
    moe: MoEConfig | None


class Linear(nn.Linear):
    """`nn.Linear` that casts its fp32 parameters to its input's dtype."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Weights from N(0, std), bias zero."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that casts its fp32 parameters to its input's dtype (computed in fp32)."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal multi-head self-attention, x_BSD to y_BSD."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_size
        self.num_heads, self.head_size = config.num_heads, config.head_size
        self.dropout = config.attention_dropout
        self.qkv = Linear(config.hidden_size, 3 * width, std=config.init_std)
        self.out = Linear(width, config.hidden_size, std=config.output_init_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        qkv_3BHSC = (
            self.qkv(x_BSD).view(B, S, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        )
        q, k, v = qkv_3BHSC.unbind(0)
        dropout = self.dropout if self.training else 0.0
        y_BHSC = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y_BHSC.transpose(1, 2).reshape(B, S, -1))


class DenseMLP(nn.Module):
    """A dense feed-forward, x_BSD to y_BSD; a gated activation has gate over up in `up`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rows = config.ffn_size * (2 if mb_kernels.is_glu(config.activation) else 1)
        self.up = Linear(config.hidden_size, rows, std=config.init_std)
        self.down = Linear(config.ffn_size, config.hidden_size, std=config.output_init_std)
        self.activation = config.activation

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(activate(self.up(x_BSD), self.activation))


class Block(nn.Module):
    """Norm, attention, residual; norm, feed-forward, residual.

    Returns y_BSD, and of a Mixture-of-Experts its weighted auxiliary loss and its metrics (None and
    {} for a dense block). The experts' own output is let go of: it need not live until the loss.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm_2 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp: nn.Module
        if config.moe is None:
            self.mlp = DenseMLP(config)
        else:
            self.mlp = (dMoE if config.moe.capacity_factor is None else MoE)(config.moe)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        x_BSD = x_BSD + self.dropout(self.attention(self.norm_1(x_BSD)))
        normed_BSD = self.norm_2(x_BSD)
        if isinstance(self.mlp, DenseMLP):
            return x_BSD + self.dropout(self.mlp(normed_BSD)), None, {}
        output: MoEOutput = self.mlp(normed_BSD)
        return x_BSD + self.dropout(output.y), output.aux_loss, output.metrics


def output_std(init_std: float, num_layers: int) -> float:
    """Init of the projections that add to the residual: std / sqrt(2 L), as in GPT-2."""
    return init_std / math.sqrt(2 * num_layers)
