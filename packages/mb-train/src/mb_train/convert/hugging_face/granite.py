"""Granite, dense and with experts: Llama's with multipliers of what flows through them.

Those with windows (`granite_swa`, `granitemoe_swa`) have sinks, and layers without positions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from mb_layers import MoEConfig
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig, whole
from mb_train.config.layers import told
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.llama import (
    experts_of,
    llama_config,
    llama_fields,
    loss_coefficient,
    rope_of,
)
from mb_train.convert.hugging_face.windows import (
    LAYER_TYPES,
    by_type,
    layer_types,
    said_of_layers,
    window_fields,
)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}  # fmt: skip
_WINDOW = 128
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "granite": _DEFAULTS,
    "granitemoe": {**_DEFAULTS, **_EXPERTS},
    "granitemoeshared": {**_DEFAULTS, **_EXPERTS, "shared_intermediate_size": 0},
    "granite_swa": {
        **_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "tie_word_embeddings": True,
        "sliding_window": _WINDOW,
    },
    "granitemoe_swa": {
        **_DEFAULTS, **_EXPERTS, "shared_intermediate_size": 0, "sliding_window": _WINDOW,
    },
}  # fmt: skip
ALIASES = {"num_experts": "num_local_experts"}
# Theirs of a layer's experts and router, in files and within transformers 5's model.
_NAMES = {
    "experts.w1": ("input_linear.weight", "experts.gate_up_proj"),
    "experts.w2": ("output_linear.weight", "experts.down_proj"),
    "router.weight": ("router.layer.weight", "router.weight"),
}
# From the former to the latter, whatever a folder has.
RENAMED = {
    rf"\.block_sparse_moe\.{re.escape(file)}$": f".block_sparse_moe.{today}"
    for file, today in _NAMES.values()
}


def granite_fields(config: Json, rope: Json | None = None) -> dict[str, Any]:
    """Llama's, and four numbers; the one of attention stands in the place of 1 / sqrt(C).

    Args:
        rope: see `llama.decoder_fields`.
    """
    return llama_fields(config, rope) | {
        "embedding_multiplier": float(config["embedding_multiplier"]),
        "residual_multiplier": float(config["residual_multiplier"]),
        "logits_scaling": float(config["logits_scaling"]),
        "attention_scale": float(config["attention_multiplier"]),
    }


def granite_moe_fields(config: Json) -> dict[str, Any]:
    """The same with Mixtral's experts, whose weights of a token add up to 1."""
    experts = experts_of(config, "num_local_experts")
    return granite_fields(config) | experts | {"moe_renormalize": True}


def granite_moe_shared_fields(config: Json) -> dict[str, Any]:
    """The same with an expert that all tokens visit, if it has a width."""
    shared = config["shared_intermediate_size"] or None
    return granite_moe_fields(config) | {"moe_shared_expert_intermediate_size": shared}


def swa_fields(config: Json) -> dict[str, Any]:
    """The dense one with sinks, and windows in all layers but each fourth, the first of them, or as
    said; layers of a base of 0 have no positions.

    Raises:
        ValueError: other bases that are not alike.
    """
    layers, bases = range(config["num_hidden_layers"]), config.get("layer_rope_theta")
    near = by_type(config, told([layer % 4 != 0 for layer in layers]))
    rope = rope_of(config)
    base = rope.get("rope_theta", config["rope_theta"])
    bases = [base] * len(layers) if bases is None else bases
    if len(bases) != len(layers) or len({*bases} - {0}) > 1:
        raise ValueError(
            "Expected layer_rope_theta of config.json to be one number or 0 for each of "
            f"{len(layers)} layers, got {bases}: this model has something that ours have not."
        )
    turned = told([base != 0 for base in bases])
    # It says over again by which base they turn, and with it by how much each is slowed.
    rope = {**rope, "rope_theta": max(bases) or base}
    return (
        granite_fields(config, rope)
        | window_fields(config, near)
        | said_of_layers(config, turned, "no_rope_freq", "rope_layers")
        | {"softmax_type": "learnable"}
    )


def moe_swa_fields(config: Json) -> dict[str, Any]:
    """The same with the experts of `granite_moe_shared_fields`."""
    return granite_moe_shared_fields(config) | swa_fields(config)


def swa_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    return granite_config(config) | _swa(config)


def moe_swa_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    return granite_moe_shared_config(config) | _swa(config)


def _swa(config: TrainConfig) -> dict[str, Any]:
    layers = range(whole(config.num_layers))
    # Their class wants a window though no layer has it.
    window = {} if config.windows else {"sliding_window": _WINDOW}
    return window | {
        LAYER_TYPES: layer_types(config),
        "layer_rope_theta": [config.rotary_base if config.has_rope(n) else 0.0 for n in layers],
    }


def granite_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    spelled = spelled_out(config)
    return llama_config(config) | {
        "embedding_multiplier": spelled.embedding_multiplier,
        "residual_multiplier": spelled.residual_multiplier,
        "logits_scaling": spelled.logits_scaling,
        "attention_multiplier": spelled.attention_scale,
    }


def granite_moe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    return granite_config(config) | {
        "num_local_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "intermediate_size": config.expert_ffn_size,
        "router_aux_loss_coef": loss_coefficient(config),
    }


def granite_moe_shared_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    shared = config.moe_shared_expert_intermediate_size or 0
    return granite_moe_config(config) | {"shared_intermediate_size": shared}


def spelled_out(config: TrainConfig) -> TrainConfig:
    """A model with the multipliers that follow from others of its fields, as a file has them."""
    embedding, residual, logits = config.multipliers or (1.0, 1.0, 1.0)
    return replace(
        config, embedding_multiplier=embedding, residual_multiplier=residual,
        logits_scaling=logits, attention_scale=config.scale_of_scores or config.head_size**-0.5,
        use_mup=False, mup_base_hidden_size=None, mup_base_head_dim=None, mup_attn_scale_power=1.0,
    )  # fmt: skip


def expert_rules(moe: MoEConfig, ours: str, theirs: str, *, today: bool = False) -> list[Rule]:
    """Those of a layer's experts, all of them in one tensor; see `experts.ExpertRules`.

    Args:
        today: by the names within transformers 5's model, not by those of files.
    """
    rules = [
        Rule(f"{ours}mlp.{our}", (f"{theirs}block_sparse_moe.{names[today]}",))
        for our, names in _NAMES.items()
    ]
    if moe.shared_expert_hidden_size is not None:
        shared = {"w1": "input_linear", "w2": "output_linear"}
        rules += [
            Rule(
                f"{ours}mlp.shared_expert.{our}",
                (f"{theirs}shared_mlp.{their}.weight",),
                lambda rows: rows[None],
                lambda w: (w.squeeze(0),),
            )
            for our, their in shared.items()
        ]
    return rules
