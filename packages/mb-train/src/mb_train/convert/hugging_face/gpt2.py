"""GPT-2: its configuration and its tensors, and ours, both ways.

Letters: H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.rules import apart, both, interleaved, own_head
from mb_train.models.config import TransformerConfig

DEFAULTS = {
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
}  # fmt: skip
ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# Two names for one function: the one that is written comes last.
_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip


def fields_of(config: Json) -> dict[str, Any]:
    """Fields of a `TrainConfig`."""
    refuse(
        config,
        activation_function=tuple(_ACTIVATIONS),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        add_cross_attention=(False,),
        is_causal=(True, None),
    )
    hidden = config["n_embd"]
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "max_position_embeddings": config["n_positions"],
        "activation": _ACTIVATIONS[config["activation_function"]],
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "attention_dropout": config["attn_pdrop"],
        "hidden_dropout": config["resid_pdrop"],
    }


def config_of(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    theirs = {ours: name for name, ours in _ACTIVATIONS.items()}
    return {
        "activation_function": theirs.get(config.activation_name, "gelu_new"),
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.ffn_size,
        "n_positions": config.positions,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }


def rules_of(config: TransformerConfig) -> list[Rule]:
    """Fused projections, stored [inputs, outputs]; names without "transformer."."""
    rules = [
        Rule("embedding.tokens.weight", ("wte.weight",)),
        Rule("embedding.positions.weight", ("wpe.weight",)),
        *both("stack.norm", "ln_f"),
        *own_head(config),
    ]
    H = config.num_heads
    for layer in range(config.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"h.{layer}."
        rules += both(f"{ours}norm_1", f"{theirs}ln_1") + both(f"{ours}norm_2", f"{theirs}ln_2")
        for kind in ("weight", "bias"):
            rules.append(
                Rule(
                    f"{ours}attention.qkv.{kind}",
                    (f"{theirs}attn.c_attn.{kind}",),
                    lambda t: interleaved(_turned(t).chunk(3), H, (1, 1, 1)),
                    lambda t: [_turned(torch.cat(apart(t, H, (1, 1, 1))))],
                )
            )
            for our, their in (
                ("attention.out", "attn.c_proj"),
                ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):
                source = (f"{theirs}{their}.{kind}",)
                rules.append(Rule(f"{ours}{our}.{kind}", source, _turned, lambda t: [_turned(t)]))
    return rules


def _turned(tensor: Tensor) -> Tensor:
    """A matrix the other way round; a vector as it is."""
    return tensor.t() if tensor.ndim == 2 else tensor
