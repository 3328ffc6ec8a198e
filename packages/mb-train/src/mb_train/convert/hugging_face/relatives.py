"""Relatives of GLM-4.5, DeepSeek-V3, Llama and Qwen2 that differ by names and by what is fixed.

MiniMax-M2 and ERNIE 4.5's experts are choices of their own, and written as such; the others are
written as the model that computes the same. All of those with experts balance the load by a bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face.chosen import seen_whole
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import decoder_rules
from mb_train.convert.hugging_face.deepseek import DEFAULTS as DEEPSEEK_DEFAULTS
from mb_train.convert.hugging_face.deepseek import (
    LATENTS,
    LAYERS_BEHIND,
    glm4_moe_fields,
    latent_decoder,
    v3_experts,
)
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import DEFAULTS as LLAMA_DEFAULTS
from mb_train.convert.hugging_face.llama import (
    decoder_fields,
    llama_config,
    llama_fields,
    local_config,
    local_fields,
    qwen3_moe_config,
    qwen3_moe_fields,
    qwen_experts,
    rope_of,
    ropes_by_kind,
    wholly_turned,
)
from mb_train.convert.hugging_face.windows import by_number, window_fields
from mb_train.models.config import TransformerConfig

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
_EXPERTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "dots1": {
        **_DEFAULTS, **_EXPERTS, "rms_norm_eps": 1e-6, "num_key_value_heads": 32,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "sliding_window": 4096, "max_window_layers": 62, "n_shared_experts": None,
    },
    "solar_open": {
        **_DEFAULTS, **_EXPERTS, "rope_theta": 1_000_000.0, "num_key_value_heads": 8,
        "head_dim": 128, "moe_intermediate_size": 1280, "n_routed_experts": 128,
        "n_shared_experts": 1, "intermediate_size": 10240,  # of dense layers: it has none
    },
    "glm4_moe_lite": {
        **LATENTS, **_EXPERTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 20,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64,
        "n_shared_experts": 1, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
        LAYERS_BEHIND: 1,
    },
    "hy_v3": {
        **_DEFAULTS, **_EXPERTS, "rope_theta": 11_158_840.0, "num_key_value_heads": 8,
        "head_dim": 128, "n_routed_experts": 192, "n_shared_experts": 1,
        "moe_intermediate_size": 1536, "routed_scaling_factor": 2.826, LAYERS_BEHIND: 1,
        "initializer_range": 0.006,
    },
    "minimax_m2": {
        **_DEFAULTS, "rope_theta": 5_000_000.0, "rms_norm_eps": 1e-6, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 256,
    },
    "qwen3_vl_moe_text": {
        **LLAMA_DEFAULTS["qwen3_moe"], "rope_theta": 500_000.0, "num_key_value_heads": 16,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_local_experts": 60,
        "tie_word_embeddings": True, "norm_topk_prob": True,
    },
    "qwen3_omni_moe_text": {
        **LLAMA_DEFAULTS["qwen3_moe"], "rope_theta": 1_000_000.0, "num_experts_per_tok": 8,
        "num_local_experts": 128, "tie_word_embeddings": True, "norm_topk_prob": True,
    },
    "glm4v_moe_text": {**DEEPSEEK_DEFAULTS["glm4_moe"], "attention_bias": True},
    "mellum": {
        **LLAMA_DEFAULTS["qwen3_moe"], "head_dim": 128, "sliding_window": 1024,
        "num_experts_per_tok": 8, "num_local_experts": 64, "moe_intermediate_size": 896,
        "norm_topk_prob": True,
    },
    "deepseek_v32": {**DEEPSEEK_DEFAULTS["deepseek_v3"], "index_topk": 2048},
    "glm_moe_dsa": {
        **DEEPSEEK_DEFAULTS["deepseek_v3"], "rms_norm_eps": 1e-5, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1,
        "topk_group": 1, "index_topk": 2048,
    },
    "seed_oss": {
        **_DEFAULTS, "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128,
        "attention_bias": True, "attention_dropout": 0.1, "residual_dropout": 0.1,
        "embd_pdrop": 0.0,  # it has none, see `read._settings_left_out`
    },
    "ernie4_5": {
        **_DEFAULTS, "rope_theta": 500_000.0, "num_key_value_heads": 2, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        **_DEFAULTS, "rope_theta": 500_000.0, "num_key_value_heads": 4,
        "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
}  # fmt: skip
HUNYUAN_ALIASES = {
    "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts", "router_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
ERNIE_ALIASES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
_BY_HEAD = {"qk_layernorm": True, "qk_layernorm_over": "head"}
# By a bias: their classes have a loss only for those who ask for it.
_BALANCED = {
    "moe_router_enable_expert_bias": True, "moe_renormalize": True, "moe_loss_weight": 0.0,
}  # fmt: skip


def dots1_fields(config: Json) -> dict[str, Any]:
    """GLM-4.5's experts; norms of heads, and windows in layers from a number on or as said."""
    experts = v3_experts(config, config["first_k_dense_replace"])
    return llama_fields(config) | window_fields(config, by_number(config)) | experts | _BY_HEAD


def solar_open_fields(config: Json) -> dict[str, Any]:
    """GLM-4.5 whose layers all have experts."""
    refuse(config, first_k_dense_replace=(0,), use_qk_norm=(False,))
    return (
        wholly_turned(config) | v3_experts(config, 0) | {"add_qkv_bias": config["attention_bias"]}
    )


def glm4_moe_lite_fields(config: Json) -> dict[str, Any]:
    """DeepSeek-V3 by another name: GLM-4.7-Flash."""
    return latent_decoder(config) | v3_experts(config, _dense_layers(config))


def hy_v3_fields(config: Json) -> dict[str, Any]:
    """GLM-4.5 with norms of heads."""
    refuse(config, n_group=(1, None), norm_topk_prob=(True,), route_norm=(True,), qk_norm=(True,))
    return llama_fields(config) | v3_experts(config, _dense_layers(config)) | _BY_HEAD


def _dense_layers(config: Json) -> int:
    """How many layers come before those with experts; where the file does not say so, one."""
    dense = dense_by_kind(config, min(1, config["num_hidden_layers"]))
    refuse(config, first_k_dense_replace=(dense,))  # their classes pass over it
    return dense


def dense_by_kind(config: Json, default: int) -> int:
    """The same as `mlp_layer_types` says; `default` where the file leaves that out.

    Raises:
        ValueError: dense layers behind others, or kinds of other layers.
    """
    layers, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    if kinds is None:
        return default
    dense, sparse = kinds.count("dense"), kinds.count("sparse")
    # By the alphabet dense ones come first.
    if not len(kinds) == layers == dense + sparse or kinds != sorted(kinds):
        raise ValueError(
            "Expected mlp_layer_types of config.json to be dense for the first of "
            f"{layers} layers and sparse for the others, got {kinds}: this model has something "
            "that ours have not."
        )
    return dense


def minimax_m2_fields(config: Json) -> dict[str, Any]:
    """Norms over the whole width, partial turns; scores of experts by sigmoids, and a bias."""
    refuse(config, attention_bias=(False,), scoring_func=("sigmoid",), use_qk_norm=(True,),
           use_routing_bias=(True,), qk_norm_type=("per_layer",),
           shared_intermediate_size=(0, None))  # fmt: skip
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise ValueError(
            "Expected attn_type_list of config.json to be 1 for every layer, got "
            f"{config['attn_type_list']}: this model has something that ours have not."
        )
    fields = decoder_fields(config)
    turned = config.get("rotary_dim")
    if turned is not None and "partial_rotary_factor" not in {**config, **rope_of(config)}:
        fields["rotary_percent"] = turned / fields["kv_channels"]
    return fields | {
        "qk_layernorm": True,
        "qk_layernorm_over": "width",
        "moe_num_experts": config["num_local_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_router_score_function": "sigmoid",
        **_BALANCED,
    }


def minimax_m2_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found = llama_config(config)
    found["rope_parameters"]["partial_rotary_factor"] = config.rotary_percent
    return found | {
        "partial_rotary_factor": config.rotary_percent,
        "rotary_dim": int(config.head_size * config.rotary_percent),
        "num_local_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "intermediate_size": config.expert_ffn_size,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


def qwen3_vl_moe_fields(config: Json) -> dict[str, Any]:
    """Qwen3-MoE, whose weights of a token always add up to 1."""
    refuse(config, norm_topk_prob=(True,), use_sliding_window=(False,))
    return qwen3_moe_fields(config)


def qwen3_vl_moe_rules(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """Its files may have a layer's experts the other way round, by rows of what goes in."""
    hidden, last = config.hidden_size, {"experts.w1": 2, "experts.w2": 1}

    def upright(rule: Rule) -> Rule:
        axis = next((n for name, n in last.items() if rule.target.endswith(name)), None)
        if axis is None or len(rule.sources) > 1:
            return rule
        return rule._replace(build=lambda w: w if w.shape[axis] == hidden else w.mT.contiguous())

    return [upright(rule) for rule in decoder_rules(config, experts)]


def mellum_fields(config: Json) -> dict[str, Any]:
    """Qwen3-MoE with windows in layers that turn otherwise."""
    far, near = ropes_by_kind(config, {"rope_theta": 500_000.0}, {"rope_theta": 10_000.0})
    dense = dense_by_kind(config, 0)
    fields = llama_fields(config, far) | local_fields(config, 1, far, near) | _BY_HEAD
    if dense >= config["num_hidden_layers"]:
        return fields
    return fields | qwen_experts(config, "num_local_experts", dense)


def mellum_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    dense, layers = config.moe_first_k_dense, whole(config.num_layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    found = qwen3_moe_config(config) | local_config(config) | {"mlp_layer_types": kinds}
    del found["rope_scaling"]  # which would be its class's rope_parameters, whatever these are
    return found


def glm4v_moe_fields(config: Json) -> dict[str, Any]:
    """GLM-4.5."""
    refuse(config, use_qk_norm=(False,))
    return glm4_moe_fields(config)


def sparse_fields(config: Json) -> dict[str, Any]:
    """DeepSeek-V3 for texts of up to as many tokens as its successors see of a text."""
    dense = dense_by_kind(config, config["first_k_dense_replace"])
    positions = {"max_position_embeddings": seen_whole(config)}
    return latent_decoder(config) | v3_experts(config, dense) | positions


def seed_oss_fields(config: Json) -> dict[str, Any]:
    """Llama's or Qwen2's, with a dropout of what is added to the residual."""
    refuse(config, attention_out_bias=(False,))
    return wholly_turned(config) | {
        "add_qkv_bias": config["attention_bias"],
        "hidden_dropout": config["residual_dropout"],
    }


ernie_rules = partial(decoder_rules, neighbours=True)


def ernie4_5_fields(config: Json) -> dict[str, Any]:
    """Llama's, whose rotations turn neighbours, see `ernie_rules`."""
    refuse(config, use_bias=(False,))
    return llama_fields(config) | {"attention_dropout": 0.0}


def ernie4_5_moe_fields(config: Json) -> dict[str, Any]:
    """The same with experts, scored by softmax and chosen by a bias more."""
    layers, dense = config["num_hidden_layers"], config["moe_layer_start_index"]
    refuse(config, moe_layer_interval=(1,), moe_layer_end_index=(-1, layers - 1),
           moe_norm_min=(1e-12,), moe_use_aux_free=(True,))  # fmt: skip
    fields = ernie4_5_fields(config)
    if dense >= layers:
        return fields
    width = config["moe_intermediate_size"]
    return fields | {
        "moe_num_experts": config["moe_num_experts"],
        "moe_top_k": config["moe_k"],
        "moe_ffn_hidden_size": width,
        "moe_first_k_dense": dense,
        "moe_shared_expert_intermediate_size": config["moe_num_shared_experts"] * width or None,
        **_BALANCED,
    }


def ernie4_5_moe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    shared = config.moe_shared_expert_intermediate_size or 0
    return llama_config(config) | {
        "use_bias": False,
        "moe_num_experts": config.moe_num_experts,
        "moe_k": config.moe_top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "moe_num_shared_experts": shared // config.expert_ffn_size,
        "moe_layer_start_index": config.moe_first_k_dense,
        "moe_layer_end_index": whole(config.num_layers) - 1,
        "moe_layer_interval": 1,
    }
