"""MiniMax-M3's text: norms around one, norms of heads, GPT-OSS's gate, experts chosen by a bias.

Published files have matrices of their own for gates and experts, by MiniMax-M2's names; those of
transformers' text model have them as it computes with them. It is written as the latter.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from mb_kernels.activation import parse
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face.chosen import SPARSE, seen_whole
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import (
    decoder_rules,
    gate_over_up,
    gate_over_up_back,
)
from mb_train.convert.hugging_face.experts import MINIMAX_M3, expert_rules
from mb_train.convert.hugging_face.llama import decoder_fields, llama_config
from mb_train.convert.hugging_face.qwen_next import around_one
from mb_train.convert.hugging_face.relatives import dense_by_kind
from mb_train.convert.hugging_face.windows import FULL, LAYER_TYPES, types_of_layers
from mb_train.models.config import TransformerConfig

# What its class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 5_000_000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 3072, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "num_experts_per_tok": 4, "num_local_experts": 128,
    "routed_scaling_factor": 2.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "index_block_size": 128, "index_topk_blocks": 16,
}  # fmt: skip
_OFFSET = 1.0  # of up, a number in their text


def minimax_m3_fields(config: Json) -> dict[str, Any]:
    """Of models that see all tokens of a text, and for texts that fit of those that choose."""
    refuse(config, use_gemma_norm=(True,), use_qk_norm=(True,), use_routing_bias=(True,),
           scoring_func=("sigmoid",), attention_output_gate=(False,))  # fmt: skip
    types_of_layers(config, SPARSE, FULL)
    # Files say swigluoai of the gate, its class silu, and both compute with the two numbers.
    fields = decoder_fields(config, act=("silu", "swigluoai"))
    alpha, limit = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    dense = _dense_layers(config)
    return (
        fields
        | {
            "max_position_embeddings": seen_whole(config),
            "swiglu": False,
            "activation": f"swiglu(alpha={alpha}, limit={limit}, offset={_OFFSET})",
            "ffn_hidden_size": config["dense_intermediate_size"],
            "qk_layernorm": True,
            "qk_layernorm_over": "head",
        }
        | ({} if dense >= config["num_hidden_layers"] else _experts(config, dense))
    )


def _experts(config: Json, dense: int) -> dict[str, Any]:
    return {
        "moe_num_experts": config["num_local_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_first_k_dense": dense,
        "moe_shared_expert_intermediate_size": config["shared_intermediate_size"] or None,
        "moe_router_score_function": "sigmoid",
        "moe_renormalize": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_loss_weight": 0.0,  # its class has one for those who ask for it
    }


def _dense_layers(config: Json) -> int:
    """Before those with experts, by the names of today or by those of files."""
    said = config.get("moe_layer_freq")
    if config.get("mlp_layer_types") is None and said is not None:
        kinds = ["sparse" if experts else "dense" for experts in said]
        counts = {"num_hidden_layers": config["num_hidden_layers"], "mlp_layer_types": kinds}
        return dense_by_kind(counts, 0)
    return dense_by_kind(config, 0)


def minimax_m3_config(config: TrainConfig) -> dict[str, Any]:
    """Back, without an indexer."""
    found, turned = llama_config(config), {"partial_rotary_factor": config.rotary_percent}
    found["rope_parameters"] |= turned
    layers, gate = whole(config.num_layers), parse(config.activation_name)
    dense = config.moe_first_k_dense
    limit = {"swiglu_limit": gate.limit} if math.isfinite(gate.limit) else {}
    return (
        found
        | turned
        | limit
        | {
            "rotary_dim": int(config.head_size * config.rotary_percent),
            "swiglu_alpha": gate.alpha,
            "dense_intermediate_size": config.ffn_size,
            "intermediate_size": config.expert_ffn_size,
            "shared_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
            "num_local_experts": config.moe_num_experts,
            "num_experts_per_tok": config.moe_top_k,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor,
            LAYER_TYPES: [FULL] * layers,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        }
    )


def file_rules(config: TransformerConfig) -> list[Rule]:
    """From published files to our tensors."""
    return around_one(decoder_rules(config, partial(expert_rules, MINIMAX_M3)))


def today_rules(config: TransformerConfig) -> list[Rule]:
    """From what transformers computes with: gates over what they gate in all layers."""
    return gate_over_up(_of_today(config))


def today_back(config: TransformerConfig) -> list[Rule]:
    """From ours to that."""
    return gate_over_up_back(_of_today(config))


def _of_today(config: TransformerConfig) -> list[Rule]:
    rules = around_one(decoder_rules(config, partial(expert_rules, MINIMAX_M3.stacked())))
    return [_fused(r) if r.target.endswith("shared_expert.w1") else r for r in rules]


def _fused(rule: Rule) -> Rule:
    name = rule.sources[0].replace("gate_proj", "gate_up_proj")
    return Rule(rule.target, (name,), lambda rows: rows[None], lambda w1: (w1.squeeze(0),))
