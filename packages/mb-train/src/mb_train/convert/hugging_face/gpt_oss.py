"""GPT-OSS: configurations and the tensors of its experts, and ours, both ways.

Every second layer has a window, each head a sink. Maps of attention have biases, and so have
routers and experts. These have a clamped SwiGLU, whose gate and up take turns in the columns of one
matrix; ours are a gate over up. Published files hold the matrices in MXFP4, transposed.

Letters: E experts, F their width, D hidden.
"""

from __future__ import annotations

import math
from typing import Any

from mb_kernels.activation import parse
from mb_layers import MoEConfig
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.llama import (
    llama_config,
    loss_coefficient,
    loss_weight,
    wholly_turned,
)
from mb_train.convert.hugging_face.mxfp4 import BLOCKS, SCALES, unpacked
from mb_train.convert.hugging_face.windows import LAYER_TYPES, by_type, layer_types, window_fields

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150_000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_dropout": 0.0,
    "attention_bias": True, "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001, "output_router_logits": False,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
ALIASES = {"num_experts": "num_local_experts"}
_OFFSET = 1.0  # of up, a number in their text


def gpt_oss_fields(config: Json) -> dict[str, Any]:
    """Of the published models and their like."""
    alpha, limit = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    # Files name a weight of a loss that transformers adds only where these logits are asked for.
    balanced = config["output_router_logits"]
    return (
        wholly_turned(config)
        | window_fields(config, by_type(config, 2))
        | {
            "swiglu": False,
            "activation": f"swiglu(alpha={alpha}, limit={limit}, offset={_OFFSET})",
            "add_bias_linear": config["attention_bias"],
            "softmax_type": "learnable",
            "moe_num_experts": config["num_local_experts"],
            "moe_ffn_hidden_size": config["intermediate_size"],
            "moe_top_k": config["num_experts_per_tok"],
            "moe_renormalize": True,
            "moe_router_bias": True,
            "moe_mlp_bias": True,
            "moe_loss_weight": loss_weight(config) if balanced else 0.0,
        }
    )


def gpt_oss_config(config: TrainConfig) -> dict[str, Any]:
    """Back.

    Raises:
        ValueError: a dense model.
    """
    if config.moe_num_experts is None:
        raise ValueError(
            "Hugging Face has no architecture for this model: the nearest, GptOssForCausalLM, has "
            "experts, got none."
        )
    gate = parse(config.activation_name)
    limit = {"swiglu_limit": gate.limit} if math.isfinite(gate.limit) else {}
    # Their class wants one though no layer has it.
    window = {} if config.windows else {"sliding_window": DEFAULTS["sliding_window"]}
    return (
        llama_config(config)
        | limit
        | window
        | {
            "swiglu_alpha": gate.alpha,
            "attention_bias": config.add_bias_linear,
            LAYER_TYPES: layer_types(config),
            "num_local_experts": config.moe_num_experts,
            "num_experts_per_tok": config.moe_top_k,
            "intermediate_size": config.expert_ffn_size,
            "router_aux_loss_coef": loss_coefficient(config),
            "output_router_logits": config.moe_loss_weight > 0,
        }
    )


def expert_rules(moe: MoEConfig, ours: str, theirs: str, *, packed: bool = False) -> list[Rule]:
    """Those of a layer, whose names begin with `ours` and `theirs`.

    Args:
        packed: matrices are in MXFP4, which is read alone.
    """
    to, of = f"{ours}mlp.", f"{theirs}mlp."
    up, down = f"{of}experts.gate_up_proj", f"{of}experts.down_proj"
    rules = [
        *(Rule(f"{to}router.{n}", (f"{of}router.{n}",)) for n in ("weight", "bias")),
        Rule(f"{to}experts.b1", (f"{up}_bias",), _gate_over_up, lambda b1: (_by_turns(b1),)),
        Rule(f"{to}experts.b2", (f"{down}_bias",)),
    ]
    w1, w2 = f"{to}experts.w1", f"{to}experts.w2"
    if packed:
        return [
            *rules,
            Rule(w1, (up + BLOCKS, up + SCALES), lambda *both: _gate_over_up(unpacked(*both))),
            Rule(w2, (down + BLOCKS, down + SCALES), unpacked),
        ]
    return [
        *rules,
        Rule(w1, (up,), lambda w: _gate_over_up(w.mT), lambda w1: (_by_turns(w1).mT,)),
        Rule(w2, (down,), lambda w: w.mT, lambda w2: (w2.mT,)),
    ]


def _gate_over_up(rows: Tensor) -> Tensor:
    """[E, 2F, ...], rows by turns of the gate and of up, as all of the gate's over up's."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _by_turns(rows: Tensor) -> Tensor:
    """The inverse."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
