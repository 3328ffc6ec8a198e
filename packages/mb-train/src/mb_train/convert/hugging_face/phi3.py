"""Phi-3 and Phi-4: Llamas or Mistrals that hold several matrices as one.

Letters: H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

from typing import Any

from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import decoder_rules, gate_over_up
from mb_train.convert.hugging_face.deepseek import partly_turned
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import decoder_fields, rope_of
from mb_train.convert.hugging_face.windows import all_layers, window_fields
from mb_train.models.config import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip


def phi3_fields(config: Json) -> dict[str, Any]:
    """A window in all layers or none, partial turns, a dropout of what is added to the residual."""
    rope = rope_of(config)  # where yarn is a name of theirs for another way
    refuse({"rope_type": rope.get("rope_type", rope.get("type"))}, rope_type=("default", None))
    windows = window_fields(config, all_layers(config))
    dropout = {"hidden_dropout": config["resid_pdrop"]}
    return partly_turned(decoder_fields(config)) | windows | dropout


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
