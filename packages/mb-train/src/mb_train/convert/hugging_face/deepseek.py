"""DeepSeek V2 and V3, and GLM-4.5, which has V3's experts: configurations, and ours, both ways.

Attention is of latents, GLM's is Llama's. The first layers are dense, and experts that all tokens
visit are one to us. V3 scores the others by sigmoids; a bias that balances the load is added to
them for the choice of experts and has no part in the weights. V2 scores by softmax. A token may be
limited to the experts of a few groups: to V3 a group is as good as its best two, to V2 as its best.
"""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face.architecture import layers_behind
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.llama import decoder_fields, llama_config, wholly_turned

_LATENT_EPSILON = 1e-6  # whatever the other norms have
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
LATENTS = {
    **_DEFAULTS, "rms_norm_eps": 1e-6, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "use_qk_norm": False, "num_nextn_predict_layers": 1,
    },
    "deepseek_v2": {
        **LATENTS, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0, "n_group": None, "topk_group": None, "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        **LATENTS, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
LAYERS_BEHIND = "num_nextn_predict_layers"
MODULES = layers_behind(LAYERS_BEHIND)
ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": LAYERS_BEHIND}
V2_ALIASES = {"num_experts": "n_routed_experts"}


def glm4_moe_fields(config: Json) -> dict[str, Any]:
    """Llama's with V3's experts; it may have biases as Qwen2, norms as Qwen3 and partial turns."""
    return (
        decoder_fields(config)
        | v3_experts(config, config["first_k_dense_replace"])
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
        | expert_config(config)
        | {
            "partial_rotary_factor": config.rotary_percent,
            "attention_bias": config.add_qkv_bias,
            "use_qk_norm": config.qk_layernorm,
        }
    )


def deepseek_v3_fields(config: Json) -> dict[str, Any]:
    """V3, R1 and whoever has their class: latent attention."""
    return latent_decoder(config) | v3_experts(config, config["first_k_dense_replace"])


def latent_decoder(config: Json) -> dict[str, Any]:
    """V3 without its experts."""
    refuse(config, rope_interleave=(True,))
    turned = config["qk_rope_head_dim"]
    return wholly_turned(config) | latent_fields(config, head_dim=turned)


def deepseek_v3_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    interleaved = {"rope_interleave": True}
    return llama_config(config) | latent_config(config) | expert_config(config) | interleaved


def deepseek_v2_fields(config: Json) -> dict[str, Any]:
    """Of V2, whose class passes over norm_topk_prob, while the code beside its files does not."""
    methods = {"greedy": {}, "group_limited_greedy": group_fields(config, score_top=1)}
    refuse(config, scoring_func=("softmax",), topk_method=tuple(methods), moe_layer_freq=(1,),
           norm_topk_prob=(False, None))  # fmt: skip
    dense = config["first_k_dense_replace"]
    layers = config["num_hidden_layers"] - dense
    experts = expert_fields(
        config,
        dense,
        # Settings of the code beside the files, which adds the losses of all layers; ours is their
        # mean.
        moe_loss_weight=(config.get("aux_loss_alpha") or 0.0) * layers,
        moe_balance_over="sequence" if config.get("seq_aux") else "micro_batch",
        **methods[config["topk_method"]],
    )
    latents = latent_fields(config, head_dim=config["qk_rope_head_dim"])
    return wholly_turned(config) | latents | experts


def deepseek_v2_config(config: TrainConfig) -> dict[str, Any]:
    """Back.

    Raises:
        ValueError: sizes that V2's class refuses, needless as that is: V3's does not.
    """
    hidden, heads = whole(config.hidden_size), whole(config.num_attention_heads)
    if hidden % heads:
        raise ValueError(
            "Hugging Face has no architecture for this model: the nearest, DeepseekV2ForCausalLM, "
            f"wants --hidden-size to be a multiple of --num-attention-heads, got {hidden} and "
            f"{heads}."
        )
    limited = config.moe_router_num_groups is not None
    layers = whole(config.num_layers) - config.moe_first_k_dense
    return (
        llama_config(config)
        | latent_config(config)
        | expert_config(config)
        | {
            "topk_method": "group_limited_greedy" if limited else "greedy",
            "norm_topk_prob": False,
            "aux_loss_alpha": config.moe_loss_weight / layers,
            "seq_aux": config.moe_balance_over == "sequence",
        }
    )


def latent_fields(config: Json, *, head_dim: int) -> dict[str, Any]:
    """In place of Llama's queries, keys and values; norms of latents have an epsilon of theirs.

    Args:
        head_dim: what this setting says of it, if the file has it.
    """
    heads, content, rotated = (
        config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    refuse(config, attention_bias=(False,), num_key_value_heads=(heads, None),
           head_dim=(head_dim, None), qk_head_dim=(content + rotated, None))  # fmt: skip
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": None,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": content,
        "qk_pos_emb_head_dim": rotated,
        "v_head_dim": config["v_head_dim"],
        "qk_layernorm": True,
        "qk_layernorm_epsilon": _LATENT_EPSILON,
    }


def latent_config(config: TrainConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "qk_head_dim": config.head_size,
        "v_head_dim": config.v_head_dim,
        "head_dim": config.qk_pos_emb_head_dim,
    }


def v3_experts(config: Json, dense: int) -> dict[str, Any]:
    """Behind so many dense layers."""
    # Settings of the files that transformers passes over: the code beside them has other choices.
    refuse(config, scoring_func=("sigmoid", "noaux_tc"), topk_method=("noaux_tc",),
           moe_layer_freq=(1,))  # fmt: skip
    return expert_fields(
        config,
        dense,
        moe_router_score_function="sigmoid",
        moe_renormalize=config["norm_topk_prob"],
        moe_router_enable_expert_bias=True,
        **group_fields(config, score_top=2),
    )


def expert_fields(config: Json, dense: int, **routing: Any) -> dict[str, Any]:
    """Theirs, whose tokens choose as `routing` says; none where all layers are dense."""
    if dense >= config["num_hidden_layers"]:
        return {}
    width, shared = config["moe_intermediate_size"], config["n_shared_experts"] or 0
    return {
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_first_k_dense": dense,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_loss_weight": 0.0,  # unless `routing` says so: their classes have no such loss
        **routing,
    }


def group_fields(config: Json, score_top: int) -> dict[str, Any]:
    """Of experts in groups, each scored by so many of its best; none of one group."""
    groups, chosen = config["n_group"] or 1, config["topk_group"]
    if groups == 1:
        refuse(config, topk_group=(1, None))
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_score_top": score_top,
    }


def expert_config(config: TrainConfig) -> dict[str, Any]:
    """Back, of all of them."""
    behind = {LAYERS_BEHIND: config.mtp_num_layers}
    if config.moe_num_experts is None:
        return {"first_k_dense_replace": config.num_layers, **behind}
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
        **behind,
    }
