"""DeepSeek's experts, behind Llama's attention (GLM-4.5): configurations, and ours, both ways.

Scores are sigmoids. A bias, which balances the load and has no part in the weights, is added to
them for the choice of experts; a token may be limited to the experts of a few groups, those with
the best two experts. The first layers are dense.
"""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.llama import decoder_fields, llama_config

_EXPERTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_EXPERTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}  # fmt: skip
LAYERS_BEHIND = "num_nextn_predict_layers"
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": LAYERS_BEHIND}


def glm4_moe_fields(config: Json) -> dict[str, Any]:
    """Llama's with V3's experts; it may have biases as Qwen2, norms as Qwen3 and partial turns."""
    fields = decoder_fields(config)
    turned = int(fields["kv_channels"] * fields["rotary_percent"])
    if turned % 2:
        raise ValueError(
            "Expected partial_rotary_factor of config.json to leave an even number of channels of "
            f"a head to turn, got {turned}: this model has something that ours have not."
        )
    return (
        fields
        | _expert_fields(config)
        | {
            "add_qkv_bias": config["attention_bias"],
            "qk_layernorm": config["use_qk_norm"],
            "qk_layernorm_over": "head",
        }
    )


def glm4_moe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found = llama_config(config)
    found["rope_parameters"]["partial_rotary_factor"] = config.rotary_percent
    return (
        found
        | _expert_config(config)
        | {
            "partial_rotary_factor": config.rotary_percent,
            "attention_bias": config.add_qkv_bias,
            "use_qk_norm": config.qk_layernorm,
        }
    )


def _expert_fields(config: Json) -> dict[str, Any]:
    # Settings of the files that transformers passes over: the code beside them has other choices.
    refuse(config, scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    width = config["moe_intermediate_size"]
    return {
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_first_k_dense": config["first_k_dense_replace"],
        "moe_shared_expert_intermediate_size": (config["n_shared_experts"] or 0) * width or None,
        "moe_router_score_function": "sigmoid",
        "moe_renormalize": config["norm_topk_prob"],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_enable_expert_bias": True,
        "moe_loss_weight": 0.0,  # as the bias balances the load
        **_group_fields(config),
    }


def _group_fields(config: Json) -> dict[str, Any]:
    groups, chosen = config["n_group"] or 1, config["topk_group"]
    if groups == 1:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _expert_config(config: TrainConfig) -> dict[str, Any]:
    shared = config.moe_shared_expert_intermediate_size or 0
    return {
        "n_routed_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "first_k_dense_replace": config.moe_first_k_dense,
        "n_shared_experts": shared // config.expert_ffn_size,
        "norm_topk_prob": config.moe_renormalize,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "num_nextn_predict_layers": 0,
    }
