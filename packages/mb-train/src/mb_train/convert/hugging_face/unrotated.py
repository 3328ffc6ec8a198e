"""SmolLM3, EXAONE 4, K-EXAONE, AFMoE (Arcee's Trinity) and Flint: some layers have no positions.

In SmolLM3 a list says which. In the others layers with a window turn queries and keys, and those
that see all tokens do not. AFMoE's attention has a gate; its embeddings may be multiplied. Flint's
has sinks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from mb_layers.state_dicts import Rule, reversed_rules

from mb_train.config import TrainConfig, whole
from mb_train.config.layers import told
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import decoder_rules
from mb_train.convert.hugging_face.deepseek import v3_experts
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import (
    dense_by_number,
    llama_config,
    llama_fields,
    qwen2_moe_config,
    qwen_experts,
)
from mb_train.convert.hugging_face.relatives import dense_by_kind
from mb_train.convert.hugging_face.windows import (
    LAYER_TYPES,
    Layers,
    by_type,
    layer_types,
    said_of_layers,
    window_fields,
    windows_if_used,
)
from mb_train.models.config import TransformerConfig

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 64, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip
_WINDOW = 4096
_FLINT_WINDOW, _INTERVAL = 513, 4
_SINKS, _OFFSET = ".self_attn.sinks", ".self_attn.softmax_offset"
FLINT_RENAMED = {rf"{re.escape(_OFFSET)}$": _SINKS}
_EXAONE = {
    **_DEFAULTS, "num_key_value_heads": 32, "sliding_window": _WINDOW, "sliding_window_pattern": 4,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "smollm3": {
        **_DEFAULTS, "rope_theta": 2_000_000.0, "rms_norm_eps": 1e-6, "num_key_value_heads": 4,
        "use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": _INTERVAL,
        "tie_word_embeddings": True,
    },
    "exaone4": _EXAONE,
    "exaone_moe": {
        **_EXAONE, **_EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    },
    "flint": {
        **_DEFAULTS, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024, "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0005, "decoder_sparse_step": 1, "sliding_window": _FLINT_WINDOW,
    },
    "afmoe": {
        **_DEFAULTS, **_EXPERTS, "head_dim": 128, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "moe_intermediate_size": 1408, "num_dense_layers": 1, "routed_scaling_factor": 1.0,
        "sliding_window": 1024, "global_attn_every_n_layers": 4, "mup_enabled": False,
    },
}  # fmt: skip
ALIASES = {
    "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}  # fmt: skip
AFMOE_ALIASES = {**ALIASES, "route_scale": "routed_scaling_factor"}
_BY_HEAD = {"qk_layernorm": True, "qk_layernorm_over": "head"}


def smollm3_fields(config: Json) -> dict[str, Any]:
    """Llama's, of which some layers have no positions, every n-th if the file does not say which.

    Raises:
        ValueError: it says so of less layers than there are.
    """
    layers, said = config["num_hidden_layers"], config.get("no_rope_layers")
    turned: Layers = config["no_rope_layer_interval"]
    if said is not None:
        turned = told(list(map(bool, said[:layers])))
        if len(said) < layers:
            raise ValueError(
                "Expected no_rope_layers of config.json to be 1 or 0 for each of "
                f"{layers} layers, got {said}."
            )
    # If the file does not say which layers have a window, only those without positions have.
    windows = windows_if_used(config, by_type(config, None))
    return llama_fields(config) | windows | _turned(config, turned)


def smollm3_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    layers = range(whole(config.num_layers))
    return llama_config(config) | {
        LAYER_TYPES: layer_types(config),
        "no_rope_layers": [int(config.has_rope(layer)) for layer in layers],
        "no_rope_layer_interval": config.no_rope_freq or _INTERVAL,
    }


def exaone4_fields(config: Json) -> dict[str, Any]:
    """Llama's with norms of heads (arXiv 2507.11407), and of outputs, as OLMo."""
    return llama_fields(config) | _exaone_windows(config) | {"norm_placement": "output"} | _BY_HEAD


def exaone4_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    said = {LAYER_TYPES: layer_types(config), "sliding_window_pattern": None}
    return llama_config(config) | _window_if_unrotated(config) | said


def exaone_moe_fields(config: Json) -> dict[str, Any]:
    """Llama's with norms of heads, and DeepSeek-V3's experts."""
    dense = dense_by_kind(config, config["first_k_dense_replace"])
    experts = v3_experts(config, dense)
    return llama_fields(config) | _exaone_windows(config) | experts | _BY_HEAD


def exaone_moe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    dense, layers = _dense_layers(config), whole(config.num_layers)
    return (
        llama_config(config)
        | _window_if_unrotated(config)
        | _expert_config(config)
        | {
            LAYER_TYPES: layer_types(config),
            "sliding_window_pattern": None,
            "first_k_dense_replace": dense,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
            "norm_topk_prob": config.moe_renormalize,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor,
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
        }
    )


# Behind an output what others call the norm behind attention.
afmoe_rules = partial(
    decoder_rules,
    norms={
        "norm_1": "input_layernorm", "norm_1_out": "post_attention_layernorm",
        "norm_2": "pre_mlp_layernorm", "norm_2_out": "post_mlp_layernorm",
    },
)  # fmt: skip


def afmoe_fields(config: Json) -> dict[str, Any]:
    """Norms before and behind each half, and of heads; gates, and DeepSeek-V3's experts."""
    refuse(config, score_func=("sigmoid",), route_norm=(True,), norm_topk_prob=(True,),
           n_group=(1, None), topk_group=(1, None), num_expert_groups=(1, None),
           num_limited_groups=(1, None))  # fmt: skip
    every = by_type(config, config["global_attn_every_n_layers"])
    return (
        llama_fields(config)
        | _windows_alone_turned(config, every)
        | v3_experts(config, config["num_dense_layers"])
        | _BY_HEAD
        | {
            "norm_placement": "both",
            "attention_output_gate": True,
            "embedding_multiplier": config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0,
        }
    )


def afmoe_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    # Their class wants a window though no layer has it.
    window = {} if config.windows else {"sliding_window": _WINDOW}
    return (
        llama_config(config)
        | window
        | _expert_config(config)
        | {
            LAYER_TYPES: layer_types(config),
            "num_dense_layers": _dense_layers(config),
            "route_scale": config.moe_router_topk_scaling_factor,
            "route_norm": True,
            "score_func": "sigmoid",
            "mup_enabled": config.embedding_multiplier != 1,
        }
    )


def flint_fields(config: Json) -> dict[str, Any]:
    """Norms of heads, sinks, and Qwen's experts scored by sigmoids, beside one that all visit."""
    layers = config["num_hidden_layers"]
    full = [layer < 2 or layer % 4 == 1 or layer == layers - 1 for layer in range(layers)]
    near = by_type(config, told([not sees_all for sees_all in full]))
    fields = llama_fields(config) | _windows_alone_turned(config, near) | _BY_HEAD
    fields |= {"softmax_type": "learnable"}
    dense = dense_by_number(config, range(2))
    if dense >= layers:
        return fields
    return (
        fields
        | qwen_experts(config, "num_experts", dense)
        | {
            "moe_router_score_function": "sigmoid",
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        }
    )


def flint_config(config: TrainConfig) -> dict[str, Any]:
    """Back.

    Raises:
        ValueError: experts without one that all tokens visit.
    """
    # Their class wants a window though no layer has it.
    window = {} if config.windows else {"sliding_window": _FLINT_WINDOW}
    dense = config.moe_num_experts is None
    if not dense and config.moe_shared_expert_intermediate_size is None:
        raise ValueError(
            "Hugging Face has no architecture for this model: the nearest, FlintForCausalLM, has "
            "an expert that all tokens visit (--moe-shared-expert-intermediate-size), got none."
        )
    return (
        (llama_config if dense else qwen2_moe_config)(config)
        | window
        | {
            LAYER_TYPES: layer_types(config),
            "mlp_only_layers": list(range(_dense_layers(config))),
        }
    )


def flint_back(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """From our tensors to its files', which have a name of their own for sinks."""
    return [
        rule._replace(target=rule.target.replace(_SINKS, _OFFSET))
        for rule in reversed_rules(decoder_rules(config, experts))
    ]


def _exaone_windows(config: Json) -> dict[str, Any]:
    """Their classes have positions in all layers if there is no window at all."""
    pattern = config["sliding_window_pattern"]
    every = by_type(config, pattern if isinstance(pattern, int) else None)
    if config["sliding_window"] is None:
        return window_fields(config, every)
    return _windows_alone_turned(config, every)


def _windows_alone_turned(config: Json, near: Layers | None) -> dict[str, Any]:
    """Fields of a model with positions where there are windows, and nowhere else.

    Raises:
        ValueError: nobody knows where, or windows of no size.
    """
    if near is None or config["sliding_window"] is None:
        raise ValueError(
            f"Expected sliding_window of config.json, and {LAYER_TYPES} with it, got "
            f"{config['sliding_window']} and {config.get(LAYER_TYPES)}: their class has no "
            "positions in layers without, and this model has something that ours have not."
        )
    return window_fields(config, near) | _turned(config, near)


def _turned(config: Json, layers: Layers) -> dict[str, Any]:
    return said_of_layers(config, layers, "no_rope_freq", "rope_layers")


def _window_if_unrotated(config: TrainConfig) -> dict[str, Any]:
    """A window that no layer has: with it these layers have no positions."""
    none_turned = config.windows is None and config.unrotated is not None
    return {"sliding_window": _WINDOW} if none_turned else {}


def _expert_config(config: TrainConfig) -> dict[str, Any]:
    if config.moe_num_experts is None:
        return {}
    shared = config.moe_shared_expert_intermediate_size or 0
    return {
        "num_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "num_shared_experts": shared // config.expert_ffn_size,
    }


def _dense_layers(config: TrainConfig) -> int:
    """Before those with experts."""
    none = config.moe_num_experts is None
    return whole(config.num_layers) if none else config.moe_first_k_dense
