"""Multi-token prediction: modules behind a GPT that learn to predict tokens beyond the next.

That of DeepSeek-V3 (arXiv 2412.19437, section 2.2). Module k = 1, 2, ... is given of each token

    x_k-1    what the module before made of it; of the first one the model's hidden states, behind
             the norm that ends them, as the head sees them
    e        the embedding of the token k places on

and returns x_k, a block like the model's last one and a norm of its own behind it, or behind a
model whose layers are halves of blocks several of these:

    x_k = stack(eh_proj([enorm(e), hnorm(x_k-1)]))

The model's head scores with x_k the token k + 1 places on: the label that the token k places on
has. Embedding and head are the model's, and learn from all losses. Attention sees what it sees in
the model, and positions are those of the tokens whose x they are.

By DeepSeek's names (and Megatron Core's): enorm, hnorm, eh_proj; the stack's norm is
shared_head.norm (final_layernorm), its block the layer itself (transformer_layer).

Letters: B sequences, S tokens of a sequence, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import FLAGS_OF_LAYERS, TransformerConfig
from mb_train.models.linear import Linear, Norm
from mb_train.models.output import ExpertReports
from mb_train.models.stack import Stack


class FurtherPrediction(nn.Module):
    """One module.

    Args:
        config: of the model.
        compute_dtype: of the activations.
    """

    def __init__(
        self, config: TransformerConfig, *, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        D = config.hidden_size
        self.enorm, self.hnorm = Norm(config), Norm(config)
        self.eh_proj = Linear(2 * D, D, std=config.init_std, bias=False)
        self.stack = Stack(layers_of_module(config), compute_dtype=compute_dtype)

    def forward(
        self, x_BSD: Tensor, further_BSD: Tensor, context: BlockContext
    ) -> tuple[Tensor, ExpertReports]:
        """x of this module, and what its experts report, from that of the one before it.

        Args:
            further_BSD: embeddings of the tokens k places on, in x's dtype.
            context: as the model's own blocks have it.
        """
        both = torch.cat([self.enorm(further_BSD), self.hnorm(x_BSD)], dim=2)
        return self.stack(self.eh_proj(both), context)


def layers_of_module(config: TransformerConfig) -> TransformerConfig:
    """Those of a module's stack: a layer like the model's last, or of a pattern of their own."""
    like = [config.num_layers - 1]
    if config.pattern is not None:  # the last of its kind
        like = [config.pattern.rindex(letter) for letter in config.mtp_pattern or ""]
    flags: dict[str, Any] = {
        name: tuple(known[layer] for layer in like)
        for name in FLAGS_OF_LAYERS
        if name != "pattern" and (known := getattr(config, name)) is not None
    }
    fp8 = config.in_fp8(config.num_layers - 1)
    return replace(
        config, num_layers=len(like), pattern=config.pattern and config.mtp_pattern, mtp_modules=0,
        mtp_pattern=None, fp8=fp8, fp8_spares=(0, 0), **flags,
    )  # fmt: skip


def names_of_modules(first: int, end: int) -> tuple[str, ...]:
    """How the names of their tensors begin in a checkpoint: of modules `first` to `end`, from 0."""
    return tuple(f"model.mtp.{number}." for number in range(first, end))


def further_labels(k: int) -> str:
    """The entry of a batch with the labels k places on, int64 [B, S]."""
    return f"labels_{k}_BS"


def further_weights(k: int) -> str:
    """That with their weights in the loss of module k, fp32 [B, S]."""
    return f"weights_{k}_BS"


def further_positions(k: int) -> str:
    """That with the positions of the tokens k places on, int64 [B or 1, S]."""
    return f"positions_{k}_BS"


def further_loss(k: int) -> str:
    """The name of the loss of module k."""
    return f"mtp_{k} loss"
