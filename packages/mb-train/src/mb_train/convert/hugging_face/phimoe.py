"""Phi-3.5-MoE (`phimoe`): Mixtral's experts, chosen in another way, and biases.

Its norms are layer norms with a bias; attention and head may have biases. Its class chooses experts
by SparseMixer, see `mb_layers.SparseMixerRouter`, two of them whatever its file says. With LongRoPE
it is read for texts up to the length that it was trained on before.
"""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.llama import (
    LONG,
    experts_of,
    mixtral_config,
    rope_of,
    wholly_turned,
)
from mb_train.convert.hugging_face.phi3 import short_texts
from mb_train.convert.hugging_face.windows import all_layers, window_fields

_TOLERANCE = 0.01  # `mb_layers.SparseMixerRouter`'s
_TOP_K = 2  # of its class
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "num_key_value_heads": 8,
    "sliding_window": None, "num_experts_per_tok": _TOP_K, "num_local_experts": 16,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": _TOLERANCE, "input_jitter_noise": 0.0,
    "attention_bias": False, "lm_head_bias": False,
}  # fmt: skip


def phimoe_fields(config: Json) -> dict[str, Any]:
    """Fields of a `TrainConfig`."""
    refuse(config, num_experts_per_tok=(_TOP_K,), router_jitter_noise=(_TOLERANCE,))
    refuse(rope_of(config), rope_type=("default", LONG), type=("default", LONG))
    config = short_texts(config)
    rope = rope_of(config)
    rope = {**rope, "attention_factor": rope["short_mscale"]} if "short_mscale" in rope else rope
    return (
        wholly_turned(config, rope)
        | experts_of(config, "num_local_experts")
        | window_fields(config, all_layers(config))
        | {
            "normalization": "LayerNorm",
            "add_bias_linear": config["attention_bias"],
            "head_bias": config["lm_head_bias"],
            "moe_router_type": "sparsemixer",
            "moe_balance_by": "scores",
        }
    )


def phimoe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found = mixtral_config(config)
    if config.rope_scaling is not None:  # its class wants them by names of its own
        found["rope_parameters"] |= dict.fromkeys(("short_mscale", "long_mscale"), config.mscale)
    return found | {
        "num_experts_per_tok": _TOP_K,
        "attention_bias": config.add_bias_linear,
        "lm_head_bias": config.head_bias,
        "router_jitter_noise": _TOLERANCE,
        "input_jitter_noise": 0.0,
    }
