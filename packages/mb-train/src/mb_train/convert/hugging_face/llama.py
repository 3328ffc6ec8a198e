"""Llama and its relatives, dense and with experts: configurations, and ours, both ways.

All have rotary positions, RMS norms and SwiGLU; they differ by a norm or a bias of queries and
keys, by windows, and by their experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.windows import (
    FULL,
    LAYER_TYPES,
    NEAR,
    Layers,
    all_layers,
    by_type,
    fitting,
    layer_types,
    qwen_windows,
    window_config,
    window_fields,
    windows_if_used,
)
from mb_train.models.config import RopeScaling
from mb_train.models.rotary import FEW_TURNS, MANY_TURNS, TRAINED_ON, sharpening

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
ORIGINAL, LONG = "original_max_position_embeddings", "longrope"
_SHARPER = ("mscale", "mscale_all_dim")  # YaRN's, of attention
# Of slowed rotations, what Llama 3.1 and 3.2 have alike.
_LLAMA3 = {
    "low_freq_factor": (FEW_TURNS,), "high_freq_factor": (MANY_TURNS,),
    ORIGINAL: (TRAINED_ON,),
}  # fmt: skip
_QWEN = {
    **_DEFAULTS, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_QWEN_MOE = {
    **_QWEN, "norm_topk_prob": False, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DEFAULTS,
    "mistral": {**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        **_DEFAULTS, "num_key_value_heads": 8, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.001,
    },
    "olmoe": {
        **_DEFAULTS, "rms_norm_eps": 1e-5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
    "qwen2_moe": {
        **_QWEN_MOE, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {**_QWEN_MOE, "num_key_value_heads": 4, "moe_intermediate_size": 768},
}  # fmt: skip


def llama_fields(config: Json, rope: Json | None = None) -> dict[str, Any]:
    """Of the dense ones; `qwen2_fields` and `qwen3_fields` for those.

    Args:
        rope: see `decoder_fields`.
    """
    refuse(config, attention_bias=(False,))
    return wholly_turned(config, rope)


def wholly_turned(config: Json, rope: Json | None = None) -> dict[str, Any]:
    """Of decoders whose classes turn whole heads, whatever a file says."""
    rope = rope_of(config) if rope is None else rope
    # transformers moves the factor among the rope's settings, other programs read it where it is.
    refuse({**config, **rope}, partial_rotary_factor=(1.0, None))
    return decoder_fields(config, rope)


def rope_of(config: Json) -> Json:
    """Settings of the rotations; those of both kinds of layers, if they are alike."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_kind = found.keys() == {NEAR, FULL} and found[NEAR] == found[FULL]
    return _of_a_kind(found[NEAR]) if by_kind else found


def _of_a_kind(rope: Json) -> Json:
    """Settings of one kind of layers, without what transformers passes over among them."""
    refuse(rope or {}, truncate=(True, None))
    return rope


def ropes_by_kind(config: Json, far: Json, near: Json) -> tuple[Json, Json]:
    """Settings of the rotations of layers that see all tokens, and of those with a window.

    Args:
        far, near: what the class has where the file is silent.

    Raises:
        ValueError: settings of other layers.
    """
    said = config.get("rope_parameters") or {}
    if not {NEAR, FULL}.issuperset(said):
        raise ValueError(
            f"Expected rope_parameters of config.json for {NEAR} and for {FULL}, got "
            f"{', '.join(said)}: this model has something that ours have not."
        )
    found = {**far, **(said.get(FULL) or {})}, {**near, **(said.get(NEAR) or {})}
    plain = {"rope_type": "default"}.items()
    far, near = ({n: v for n, v in rope.items() if (n, v) not in plain} for rope in found)
    return far, near


def local_fields(config: Json, default: Layers, far: Json, near: Json) -> dict[str, Any]:
    """Windows, see `by_type`, of layers that turn otherwise than the others, if they do.

    Raises:
        ValueError: rotations with a window that are slowed.
    """
    layers = by_type(config, default)
    fields = window_fields(config, layers)
    _of_a_kind(far)
    if far == near or layers == 1:
        return fields
    refuse(near, rope_type=("default", None), partial_rotary_factor=(1.0, None))
    return fields | {"rotary_base_local": float(near["rope_theta"])}


def local_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    far = llama_config(config)["rope_parameters"]
    far.pop("truncate", None)  # see `_of_a_kind`: a model that needs it is refused
    plain = {"rope_type": "default", "rope_theta": config.local_base}
    near = far if config.local_base is None else plain
    ropes = {FULL: far, NEAR: near}
    return {LAYER_TYPES: layer_types(config), "rope_parameters": ropes, "rope_scaling": None}


def decoder_fields(
    config: Json, rope: Json | None = None, *, act: tuple[str, ...] = ("silu", "swish")
) -> dict[str, Any]:
    """What all decoders of this kind have: rotary positions, RMS norms and SwiGLU.

    Args:
        rope: settings of the rotations; None: as most files have them.
        act: names that the gate may have.
    """
    refuse(config, hidden_act=act, mlp_bias=(False,), is_causal=(True, None))
    rope = rope_of(config) if rope is None else rope
    turned = {**config, **rope}.get("partial_rotary_factor")
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": width,
        "ffn_hidden_size": config["intermediate_size"],
        "max_position_embeddings": fitting(config),
        "position_embedding_type": "rope",
        **_scaling_fields(rope, config, width),
        "rotary_base": float(rope.get("rope_theta", config["rope_theta"])),
        "rotary_percent": 1.0 if turned is None else float(turned),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "attention_dropout": config["attention_dropout"],
        "hidden_dropout": 0.0,
    }


def _scaling_fields(rope: Json, config: Json, width: int) -> dict[str, Any]:
    """How rotations of heads of this width are slowed, which older files call type."""
    if kinds := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(
            f"Expected one rope for all layers of config.json, got one each for {kinds[0]} and "
            "the like: this model has something that ours have not."
        )
    kind = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    refuse(kind, rope_type=("default", "linear", "llama3", "yarn", LONG))
    if kind["rope_type"] == "linear":
        return {"rotary_seq_len_interpolation_factor": float(rope["factor"])}
    if kind["rope_type"] == "default":
        return {}
    positions = trained_on(config, rope)
    if kind["rope_type"] == LONG:  # alike for texts of any length, see `phi3.short_texts`
        refuse(rope, long_factor=(rope["short_factor"],))
        factors = [float(factor) for factor in rope["short_factor"]]
        return {
            "rope_type": LONG,
            "rotary_factors": factors,
            "mscale": long_sharpening(config, rope),
        }
    if kind["rope_type"] == "yarn":
        longer = config["max_position_embeddings"] / positions
        factor = longer if rope["factor"] is None else rope["factor"]
        return _yarn_fields({**rope, "factor": factor}) | {ORIGINAL: positions}
    if any({**rope, ORIGINAL: positions}[name] not in of for name, of in _LLAMA3.items()):
        turned = {**config, **rope}.get("partial_rotary_factor")
        width = width if turned is None else int(width * turned)
        base = float(rope.get("rope_theta", config["rope_theta"]))
        factors = _factors(rope, [base ** (-n / width) for n in range(0, width, 2)], positions)
        return {"rope_type": LONG, "rotary_factors": factors}
    return {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def _factors(rope: Json, speeds: list[float], trained_on: int) -> list[float]:
    """By how much Llama 3.1's way slows each speed, with numbers other than Llama 3.1's own."""
    few, many, slow = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    found = []
    for turns in (speed * trained_on / (2 * math.pi) for speed in speeds):
        kept = float(turns >= many) if few == many else (turns - few) / (many - few)
        kept = min(max(kept, 0), 1)
        found.append(1 / (kept + (1 - kept) / slow))
    return found


def trained_on(config: Json, rope: Json) -> int:
    """The length of texts before rotations were slowed."""
    # Beside the others it counts for more than among them, as Phi-3's files have it.
    return config.get(ORIGINAL, rope.get(ORIGINAL, config["max_position_embeddings"]))


def long_sharpening(config: Json, rope: Json) -> float:
    """What LongRoPE multiplies queries and keys by, if its file does not say."""
    if (said := rope.get("attention_factor")) is not None:
        return float(said)
    length = trained_on(config, rope)
    longer = rope.get("factor") or config["max_position_embeddings"] / length
    return math.sqrt(1 + math.log(max(longer, 1)) / math.log(length))


def _yarn_fields(rope: Json) -> dict[str, Any]:
    refuse(rope, truncate=(True, False))
    sharper = {name: rope.get(name) or 0 for name in _SHARPER}
    if not all(sharper.values()):
        # One of the two alone transformers passes over, in the table of angles.
        refuse(sharper, mscale=(1, 0), mscale_all_dim=(0,))
        sharper = {"mscale": 1, "mscale_all_dim": 0}
    scaling = RopeScaling("yarn", rope["factor"])
    longer = [sharpening(scaling, sharper[name]) for name in _SHARPER]
    said = rope.get("attention_factor")
    if said is not None and not math.isclose(said, longer[0] / longer[1], rel_tol=1e-6):
        refuse(rope, attention_factor=(None, longer[0] / longer[1]))
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_truncate": rope.get("truncate", True),
        **{name: float(value) for name, value in sharper.items()},
    }


def llama_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    rope: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope["rope_type"], rope["factor"], *_ = config.rope_scaling
        if config.use_rope_scaling:
            rope |= {name: allowed[0] for name, allowed in _LLAMA3.items()}
        if rope["rope_type"] == "yarn":
            names = [ORIGINAL, "beta_fast", "beta_slow"]
            names += _SHARPER if config.mscale and config.mscale_all_dim else ()
            rope |= {name: getattr(config, name) for name in names}
            rope |= {} if config.yarn_truncate else {"truncate": False}
        if rope["rope_type"] == LONG:
            factors = dict.fromkeys(("short_factor", "long_factor"), config.rotary_factors)
            rope |= {**factors, "attention_factor": config.mscale, ORIGINAL: config.positions}
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "rope_theta": config.rotary_base,
        "rope_parameters": rope,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "hidden_act": "silu",
        "rms_norm_eps": config.layernorm_epsilon,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "attention_dropout": config.attention_dropout,
        "attention_bias": False,
        **window_config(config),
    }


def mistral_fields(config: Json) -> dict[str, Any]:
    """Llama's with a window in all layers, or none."""
    return llama_fields(config) | window_fields(config, all_layers(config))


def qwen2_fields(config: Json) -> dict[str, Any]:
    """Llama's with biases for queries, keys and values."""
    return llama_fields(config) | qwen_windows(config) | {"add_qkv_bias": True}


def qwen3_fields(config: Json) -> dict[str, Any]:
    """Llama's with norms over the heads of queries and keys."""
    norms = {"qk_layernorm": True, "qk_layernorm_over": "head"}
    return llama_fields(config) | qwen_windows(config) | norms


def mixtral_fields(config: Json) -> dict[str, Any]:
    windows = window_fields(config, all_layers(config))
    return _with_experts(config, "num_local_experts") | windows | {"moe_renormalize": True}


def mixtral_config(config: TrainConfig) -> dict[str, Any]:
    return llama_config(config) | _experts(config, "num_local_experts")


def olmoe_fields(config: Json) -> dict[str, Any]:
    """With norms over all heads at once, which are as wide as the model, and clipping behind."""
    clip = config.get("clip_qkv")
    return _with_experts(config, "num_experts") | {
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "clip_qkv": None if clip is None else float(clip),
        "moe_renormalize": config["norm_topk_prob"],
        "qk_layernorm": True,
        "qk_layernorm_over": "width",
    }


def olmoe_config(config: TrainConfig) -> dict[str, Any]:
    return llama_config(config) | _experts(config, "num_experts") | {"clip_qkv": config.clip_qkv}


def qwen2_moe_fields(config: Json) -> dict[str, Any]:
    """With a gated expert that every token visits, and biases as Qwen2."""
    # Which layers have a window if the file does not say has changed with transformers.
    windows = windows_if_used(config, by_type(config, None))
    return (
        _qwen_moe_fields(config, "num_experts")
        | windows
        | {
            "add_qkv_bias": config["qkv_bias"],
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    )


def qwen2_moe_config(config: TrainConfig) -> dict[str, Any]:
    types = {} if config.windows is None else {LAYER_TYPES: layer_types(config)}
    return (
        _qwen_moe_config(config)
        | types
        | {
            "qkv_bias": config.add_qkv_bias,
            "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        }
    )


def qwen3_moe_fields(config: Json) -> dict[str, Any]:
    norms = {"qk_layernorm": True, "qk_layernorm_over": "head"}
    windows = windows_if_used(config, all_layers(config))
    return _qwen_moe_fields(config, "num_local_experts") | windows | norms


def qwen3_moe_config(config: TrainConfig) -> dict[str, Any]:
    return _qwen_moe_config(config) | {"num_local_experts": config.moe_num_experts}


def _with_experts(config: Json, count: str) -> dict[str, Any]:
    return llama_fields(config) | experts_of(config, count)


def experts_of(config: Json, count: str) -> dict[str, Any]:
    """Experts as wide as a dense layer would be; `count` is the setting that says how many."""
    return {
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": config[count],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_loss_weight": loss_weight(config),
    }


def loss_weight(config: Json) -> float:
    """That of ours: theirs counts every choice of a token, and is top-k when balanced, ours 1."""
    return config["num_experts_per_tok"] * (config["router_aux_loss_coef"] or 0.0)


def loss_coefficient(config: TrainConfig) -> float:
    """Back."""
    return config.moe_loss_weight / config.moe_top_k


def _experts(config: TrainConfig, count: str) -> dict[str, Any]:
    return {
        count: config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "intermediate_size": config.expert_ffn_size,
        "norm_topk_prob": config.moe_renormalize,
        "router_aux_loss_coef": loss_coefficient(config),
    }


def _qwen_moe_fields(config: Json, count: str) -> dict[str, Any]:
    return llama_fields(config) | qwen_experts(config, count)


def qwen_experts(config: Json, count: str, dense: int | None = None) -> dict[str, Any]:
    """Experts of a width of their own, and dense layers before the first of them.

    Args:
        dense: how many; None: as `mlp_only_layers` says.
    """
    return experts_of(config, count) | {
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_first_k_dense": dense_by_number(config, ()) if dense is None else dense,
        "moe_renormalize": config["norm_topk_prob"],
    }


def dense_by_number(config: Json, default: Collection[int]) -> int:
    """How many dense layers come first; `default` where the file does not say which they are.

    Raises:
        ValueError: dense layers elsewhere.
    """
    refuse(config, decoder_sparse_step=(1,))
    said = config.get("mlp_only_layers")
    dense = sorted(set(default if said is None else said))
    if dense != list(range(len(dense))):
        raise ValueError(
            f"Expected mlp_only_layers of config.json to be the first layers, got {dense}."
        )
    return len(dense)


def _qwen_moe_config(config: TrainConfig) -> dict[str, Any]:
    return (
        llama_config(config)
        | _experts(config, "num_experts")
        | {
            "intermediate_size": config.ffn_size,
            "moe_intermediate_size": config.expert_ffn_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(config.moe_first_k_dense)),
        }
    )
