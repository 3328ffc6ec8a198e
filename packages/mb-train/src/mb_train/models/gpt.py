"""GPT: learned positions, pre-LN blocks, a head tied to the token embedding, and its loss.

The loss is cross entropy in fp32, from the last hidden states and the head's weight in one
autograd op that works on a slice of tokens at a time and never keeps the [tokens, V] logits: the
gradient of the logits, softmax minus one-hot, is formed in place of them in the forward pass (the
scheme of Liger-Kernel, arXiv 2410.10989). A model of 50,304 words needs less memory for it than for
one layer.

Letters: B sequences, S tokens of a sequence, T = B*S tokens, D hidden, V padded vocabulary, L
layers, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mb_layers import MoEConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mb_train.config import TrainConfig, whole
from mb_train.transformer import Block, BlockConfig, LayerNorm, output_std

# Tokens per slice of the loss: at V = 50,304 a slice of fp32 logits is 0.8 GiB on a GPU, where
# large products are what is fast, and 50 MiB on a CPU.
_LOSS_SLICE = {"cpu": 256, "cuda": 4096}


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
        x_BSD, outputs = self._hidden(tokens_BS)
        lm_loss = linear_cross_entropy(x_BSD.flatten(0, 1), self.tokens.weight, labels_BS.flatten())
        if not outputs:
            return GPTOutput(lm_loss, lm_loss.new_zeros(()), {})
        aux_loss = torch.stack([output.aux_loss for output in outputs]).mean()
        metrics = {
            key: torch.stack([output.metrics[key] for output in outputs])
            for key in outputs[0].metrics
        }
        return GPTOutput(lm_loss, aux_loss, metrics)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Scores of the next token at every position, [B, S, V] fp32."""
        x_BSD, _ = self._hidden(tokens_BS)
        return F.linear(x_BSD, self.tokens.weight.to(x_BSD.dtype)).float()

    def _hidden(self, tokens_BS: Tensor) -> tuple[Tensor, list[Any]]:
        """Final normed hidden states, and the outputs of the MoE layers."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.tokens(tokens_BS) + self.positions(positions_S)
        x_BSD = self.dropout(x_BSD).to(self.compute_dtype)
        outputs = []
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_BSD, output = checkpoint(block, x_BSD, use_reentrant=False)
            else:
                x_BSD, output = block(x_BSD)
            if output is not None:
                outputs.append(output)
        return self.norm(x_BSD), outputs


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


def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Mean cross entropy of `x_TD @ weight_VD^T` against `labels_T`, without keeping the logits.

    Args:
        x_TD: bf16 or fp32; the product is computed in its dtype, the rest in fp32.
        weight_VD: fp32, or the dtype of x.
        labels_T: int64 in [0, V), at least one.

    Returns:
        The loss in nats, fp32 scalar.
    """
    return _LinearCrossEntropy.apply(x_TD, weight_VD, labels_T)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        tokens, rows = x_TD.shape[0], _LOSS_SLICE.get(x_TD.device.type, 1024)
        w_VD = weight_VD.to(x_TD.dtype)
        losses_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
        dx_TD = torch.empty_like(x_TD) if need_x else None
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        for start in range(0, tokens, rows):
            here = slice(start, start + rows)
            labels_R1 = labels_T[here, None]
            logits_RV = (x_TD[here] @ w_VD.t()).float()
            lse_R1 = logits_RV.logsumexp(1, keepdim=True)
            losses_T[here] = (lse_R1 - logits_RV.gather(1, labels_R1))[:, 0]
            if not (need_x or need_weight):
                continue
            # The gradient of the logits, softmax - one-hot, takes their place.
            grad_RV = logits_RV.sub_(lse_R1).exp_()
            grad_RV.scatter_add_(1, labels_R1, grad_RV.new_full(labels_R1.shape, -1.0))
            grad_RV = grad_RV.to(x_TD.dtype)
            if dx_TD is not None:
                torch.mm(grad_RV, w_VD, out=dx_TD[here])
            if dw_VD is not None:
                _add_product(dw_VD, grad_RV.t(), x_TD[here])
        ctx.save_for_backward(dx_TD, dw_VD)
        ctx.weight_dtype, ctx.tokens = weight_VD.dtype, tokens
        return losses_T.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx_TD, dw_VD = ctx.saved_tensors
        dx = dw = None
        if dx_TD is not None:
            dx = dx_TD * (grads[0] / ctx.tokens).to(dx_TD.dtype)
        if dw_VD is not None:
            dw = (dw_VD * (grads[0] / ctx.tokens)).to(ctx.weight_dtype)
        return dx, dw, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (fp32) += a @ b, in place."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
