"""GPT-2's configuration and ours, both ways."""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse

GPT2_DEFAULTS = {
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
}  # fmt: skip
GPT2_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
}  # fmt: skip
# Two names for one function: the one that is written comes last.
_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip


def gpt2_fields(config: Json) -> dict[str, Any]:
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


def gpt2_config(config: TrainConfig) -> dict[str, Any]:
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
