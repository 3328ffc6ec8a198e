"""HunYuan of 2025 (V1), dense and with experts: norms of heads behind their rotation.

An expert that every token visits is as wide as the others. Rotations for longer texts are those of
a larger base (NTK), which its files call dynamic though the length of a text has no part in it.
"""

from __future__ import annotations

from typing import Any

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import decoder_rules
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import llama_config, llama_fields, rope_of
from mb_train.models.config import TransformerConfig

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": _DEFAULTS,
    "hunyuan_v1_moe": {**_DEFAULTS, "num_experts": 1, "moe_topk": 1},
}
ALIASES = {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}
_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def dense_fields(config: Json) -> dict[str, Any]:
    """Llama's with these norms and this base."""
    refuse(config, use_qk_norm=(True,), use_cla=(False,))
    rope = rope_of(config)
    if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
        base = rope.get("rope_theta", config["rope_theta"])
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        base *= rope["alpha"] ** (width / (width - 2))
        config = {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": base}}
    return llama_fields(config) | {"qk_layernorm": True, "qk_layernorm_over": "turned-head"}


def moe_fields(config: Json) -> dict[str, Any]:
    """The same with experts in all layers, by softmax over the chosen ones."""
    width = config["intermediate_size"]
    said = {
        name: _of_all(config, name)
        for name in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")
        if name in config
    }
    refuse(said, moe_intermediate_size=(width, None), num_shared_expert=(1, None))
    refuse(config, moe_layer_num_skipped=(0,), use_mixed_mlp_moe=(True,))
    return dense_fields(config) | {
        "moe_num_experts": said["num_experts"],
        "moe_top_k": said["moe_topk"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width,
        "moe_renormalize": True,
        "moe_loss_weight": 0.0,  # its class has no such loss
    }


def _of_all(config: Json, name: str) -> Any:
    """A setting that may be a list, of a number for each layer.

    Raises:
        ValueError: of unlike numbers.
    """
    said = config[name]
    if not isinstance(said, list):
        return said
    if len(set(said)) != 1:
        raise ValueError(
            f"Expected {name} of config.json to be alike in all layers, got {said}: this model has "
            "something that ours have not."
        )
    return said[0]


def moe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    return llama_config(config) | {
        "num_experts": config.moe_num_experts,
        "moe_topk": config.moe_top_k,
        "intermediate_size": config.expert_ffn_size,
    }


def hunyuan_rules(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """Llama's by other names of these norms."""
    rules = []
    for rule in decoder_rules(config, experts):
        for usual, name in _NORMS.items():
            renamed = tuple(s.replace(f".{usual}.", f".{name}.") for s in rule.sources)
            rule = rule._replace(sources=renamed)
        rules.append(rule)
    return rules
