"""GLM-4: norms before each half of a block and behind its output, and partial turns of neighbours.

Of the models of 2025 (GLM-4-0414, GLM-Z1); those before have no norms behind outputs.
"""

from __future__ import annotations

from typing import Any

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.decoder_rules import (
    decoder_rules,
    gate_over_up,
    gate_over_up_back,
)
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import decoder_fields, llama_config
from mb_train.models.config import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1.5625e-7,
    "tie_word_embeddings": False, "attention_bias": True, "attention_dropout": 0.0,
    "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
}  # fmt: skip


def glm4_fields(config: Json) -> dict[str, Any]:
    """Llama's with these norms, which may have biases as Qwen2."""
    return decoder_fields(config) | {
        "norm_placement": "both",
        "add_qkv_bias": config["attention_bias"],
    }


def glm4_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found = llama_config(config)
    turned = {"partial_rotary_factor": config.rotary_percent}
    found["rope_parameters"] |= turned
    return found | turned | {"attention_bias": config.add_qkv_bias}


def glm4_rules(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """From their tensors to ours."""
    return gate_over_up(decoder_rules(config, experts, neighbours=True))


def glm4_back(_: TrainConfig, config: TransformerConfig) -> list[Rule]:
    """From ours to theirs, of a dense model."""
    return gate_over_up_back(decoder_rules(config, lambda *_: [], neighbours=True))
