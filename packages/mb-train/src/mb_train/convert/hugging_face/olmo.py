"""OLMo 2 and 3, and FlexOlmo: the output of each half of a block is normed, not its input.

Queries and keys have norms over all heads at once (arXiv 2501.00656). FlexOlmo has OLMoE's experts
(arXiv 2507.07024).
"""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.llama import (
    llama_config,
    llama_fields,
    local_config,
    local_fields,
    olmoe_config,
    olmoe_fields,
    ropes_by_kind,
)

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
_WINDOW = 4096
_OLMO3_BASE = 500_000.0
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "olmo2": _DEFAULTS,
    "olmo3": {**_DEFAULTS, "rope_theta": _OLMO3_BASE, "sliding_window": _WINDOW},
    "flex_olmo": {
        **_DEFAULTS, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6, "num_experts": 7,
        "num_experts_per_tok": 5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
}  # fmt: skip
_OUTPUT = {"norm_placement": "output", "qk_layernorm": True}


def olmo2_fields(config: Json) -> dict[str, Any]:
    """Llama's with these norms."""
    return llama_fields(config) | _OUTPUT | {"qk_layernorm_over": "width"}


def olmo3_fields(config: Json) -> dict[str, Any]:
    """The same with windows in all layers but every fourth, or as said, which are not slowed."""
    # What stands beside the ropes of each kind of layer is of layers without a window alone.
    far, near = ropes_by_kind(
        config, {"rope_theta": config["rope_theta"]}, {"rope_theta": _OLMO3_BASE}
    )
    slowed = config.get("rope_scaling") or {}
    # By the older name of it their class does not slow them.
    refuse(slowed, type=(slowed.get("rope_type", "default"),))
    far = {**far, **slowed}
    return (
        llama_fields(config, far)
        | local_fields(config, 4, far, near)
        | _OUTPUT
        | {"qk_layernorm_over": "width"}
    )


def olmo3_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    # Their class wants a window though no layer has it.
    window = {} if config.windows else {"sliding_window": _WINDOW}
    return llama_config(config) | window | local_config(config)


def flex_olmo_fields(config: Json) -> dict[str, Any]:
    """OLMoE's with these norms, and heads of any width."""
    refuse(config, clip_qkv=(None,))  # its class passes over it
    width = llama_fields(config)["kv_channels"]
    return olmoe_fields(config) | _OUTPUT | {"kv_channels": width}


def flex_olmo_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found = olmoe_config(config)
    del found["clip_qkv"]  # which it has not
    return found
