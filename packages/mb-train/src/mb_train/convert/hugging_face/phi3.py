"""Phi-3 and Phi-4: Llamas or Mistrals that hold several matrices as one.

Those with LongRoPE are read for texts up to the length that they were trained on before.

Letters: H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

from typing import Any

from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import decoder_rules, gate_over_up
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import (
    LONG,
    ORIGINAL,
    decoder_fields,
    long_sharpening,
    rope_of,
    trained_on,
)
from mb_train.convert.hugging_face.windows import all_layers, window_fields
from mb_train.models.config import TransformerConfig

_NAMES = (LONG, "su", "yarn")  # that their files have for it
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    ORIGINAL: 4096,
}  # fmt: skip


def phi3_fields(config: Json) -> dict[str, Any]:
    """A window in all layers or none, partial turns, a dropout of what is added to the residual."""
    config = short_texts(config)
    refuse(rope_of(config), rope_type=("default", LONG), type=("default", LONG))
    windows = window_fields(config, all_layers(config))
    dropout = {"hidden_dropout": config["resid_pdrop"]}
    return decoder_fields(config) | windows | dropout


def short_texts(config: Json) -> Json:
    """Settings of a model with LongRoPE as it is for texts up to the length trained on before.

    In longer ones every token turns by other factors, the first too, and is multiplied by another
    number. Where these are alike it is for texts of any length.
    """
    rope = rope_of(config)
    if rope.get("rope_type", rope.get("type")) not in _NAMES:
        return config
    positions, window = config["max_position_embeddings"], config.get("sliding_window")
    if any(rope.get(f"short_{name}") != rope.get(f"long_{name}") for name in ("factor", "mscale")):
        positions = min(positions, trained_on(config, rope))
    if window is not None and window >= positions:
        window = None
    found = {name: value for name, value in rope.items() if name != "type"}
    found |= {"rope_type": LONG, "long_factor": rope["short_factor"]}
    found["attention_factor"] = long_sharpening(config, rope)
    return {
        **config,
        "max_position_embeddings": positions,
        "sliding_window": window,
        "rope_parameters": found,
        "rope_scaling": None,
    }


def phi3_rules(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """Llama's rules of the parts of these matrices."""
    H, G, C = config.num_heads, config.num_kv_heads, config.head_size
    rules = []
    for rule in gate_over_up(decoder_rules(config, experts)):
        if rule.target.endswith("attention.qkv.weight"):

            def of_one(rows: Tensor, build: Any = rule.build) -> Tensor:
                return build(*rows.split([H * C, G * C, G * C]))

            rule = Rule(rule.target, (rule.sources[0].replace("q_proj", "qkv_proj"),), of_one)
        rules.append(rule)
    return rules
