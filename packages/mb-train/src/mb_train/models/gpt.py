"""GPT: learned positions, pre-LN blocks, a head tied to the token embedding, and its loss.

Letters: B sequences, S tokens of a sequence, D hidden, V padded vocabulary, L layers, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mb_train.config import TrainConfig, whole
from mb_train.models.cross_entropy import linear_cross_entropy
from mb_train.transformer import Block, BlockConfig, LayerNorm, output_std


class GPTOutput(NamedTuple):
    """lm_loss: fp32 scalar, mean cross entropy in nats. aux_loss: fp32 scalar, mean over the MoE
    layers of their weighted losses (0 for a dense model). metrics: detached, each [L, ...]."""

    lm_loss: Tensor
    aux_loss: Tensor
    metrics: dict[str, Tensor]


class GPT(nn.Module):
    """A GPT built from a run's configuration.

    Args:
        config: sizes, activation, experts, init.
        vocab_size: V, padded.
        compute_dtype: dtype of the activations; parameters are made in fp32.

    Attributes:
        blocks: the L transformer blocks, each a unit of sharding and of recompute.
    """

    def __init__(
        self,
        config: TrainConfig,
        vocab_size: int,
        *,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        block = block_config(config)
        self.compute_dtype = compute_dtype
        self.recompute = config.recompute_granularity == "full"
        self.init_std = config.init_method_std
        self.tokens = nn.Embedding(vocab_size, block.hidden_size)
        self.positions = nn.Embedding(config.positions, block.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        layers = whole(config.num_layers)
        self.blocks = nn.ModuleList(Block(block) for _ in range(layers))
        self.norm = LayerNorm(block.hidden_size, eps=block.norm_eps)
        nn.init.normal_(self.tokens.weight, std=self.init_std)
        nn.init.normal_(self.positions.weight, std=self.init_std)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> GPTOutput:
        """Loss of predicting `labels_BS` (int64) from `tokens_BS` (int64) and those before."""
        x_BSD, aux_losses, metrics = self._hidden(tokens_BS)
        lm_loss = linear_cross_entropy(x_BSD.flatten(0, 1), self.tokens.weight, labels_BS.flatten())
        if not aux_losses:
            return GPTOutput(lm_loss, lm_loss.new_zeros(()), {})
        by_layer = {key: torch.stack([layer[key] for layer in metrics]) for key in metrics[0]}
        return GPTOutput(lm_loss, torch.stack(aux_losses).mean(), by_layer)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Scores of the next token at every position, [B, S, V] fp32."""
        x_BSD, _, _ = self._hidden(tokens_BS)
        return F.linear(x_BSD, self.tokens.weight.to(x_BSD.dtype)).float()

    def _hidden(self, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor], list[dict[str, Tensor]]]:
        """Final normed hidden states; auxiliary losses and metrics of the MoE layers."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.tokens(tokens_BS) + self.positions(positions_S)
        x_BSD = self.dropout(x_BSD).to(self.compute_dtype)
        aux_losses, metrics = [], []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_BSD, aux_loss, measured = checkpoint(block, x_BSD, use_reentrant=False)
            else:
                x_BSD, aux_loss, measured = block(x_BSD)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
                metrics.append(measured)
        return self.norm(x_BSD), aux_losses, metrics


def block_config(config: TrainConfig) -> BlockConfig:
    """What a block of this run is built from.

    Raises:
        ValueError: an activation or experts that mb_layers refuses.
    """
    residual_std = output_std(config.init_method_std, whole(config.num_layers))
    moe = None
    if config.moe_num_experts is not None:
        moe = MoEConfig(
            hidden_size=whole(config.hidden_size),
            ffn_hidden_size=config.ffn_size,
            num_experts=config.moe_num_experts,
            top_k=config.moe_top_k,
            activation=config.activation_name,
            capacity_factor=config.moe_capacity_factor or None,
            load_balancing_loss_weight=config.moe_loss_weight,
            z_loss_weight=config.moe_z_loss_weight,
            renormalize=config.moe_renormalize,
            jitter_eps=config.moe_jitter_eps,
            init_method_std=config.init_method_std,
            output_init_std=residual_std,
            recompute=config.moe_recompute,
        )
    return BlockConfig(
        hidden_size=whole(config.hidden_size),
        num_heads=whole(config.num_attention_heads),
        head_size=config.head_size,
        ffn_size=config.ffn_size,
        activation=config.activation_name,
        attention_dropout=config.attention_dropout,
        hidden_dropout=config.hidden_dropout,
        norm_eps=config.layernorm_epsilon,
        init_std=config.init_method_std,
        output_init_std=residual_std,
        moe=moe,
    )
