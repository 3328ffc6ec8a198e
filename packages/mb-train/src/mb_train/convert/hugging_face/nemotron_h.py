"""Nemotron-H and Nemotron 3: Mamba-2, attention, feed-forwards and experts, one in each layer.

Their layers are ours (`--hybrid-layer-pattern`), without positions or gates; the experts are chosen
as DeepSeek-V3's, beside one for all tokens. A module for further tokens has several such layers
(`mtp.layers.*`), counted through all modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mb_layers import MoEConfig
from mb_layers.state_dicts import Rule, reversed_rules

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.architecture import Modules
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import attention_rules, module_rules
from mb_train.convert.hugging_face.deepseek import LAYERS_BEHIND, group_fields
from mb_train.convert.hugging_face.mamba_rules import mamba_back, mamba_rules, refuse_bounds
from mb_train.convert.hugging_face.rules import own_head
from mb_train.models.config import TransformerConfig
from mb_train.models.mtp import layers_of_module

_TYPES, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_MTP_TYPES, _MTP_PATTERN = f"mtp_{_TYPES}", f"mtp_{_PATTERN}"
_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_BEFORE = {"mamba": "M", "attention": "*"}  # names of before
# transformers' class takes this for a bound of steps, too; 0 has no logarithm, which it also takes.
_NO_LEAST_STEP = 1e-12
# What the class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        _TYPES: None, _MTP_TYPES: None, LAYERS_BEHIND: 0, "num_key_value_heads": 8,
        "head_dim": 128, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False, "hidden_size": 4096, "num_attention_heads": 32,
        "max_position_embeddings": 4096, "intermediate_size": 21_504, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "moe_latent_size": None,
    },
}  # fmt: skip
ALIASES = {
    "layer_types": _TYPES, "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}  # fmt: skip


def nemotron_h_fields(config: Json) -> dict[str, Any]:
    """A letter for each layer, and the sizes of each kind.

    Raises:
        ValueError: kinds of layers that are none of ours.
    """
    refuse(config, use_bias=(False,), mlp_bias=(False,), attention_bias=(False,),
           mamba_proj_bias=(False,), use_conv_bias=(True,), mamba_hidden_act=("silu",),
           mlp_hidden_act=("relu2",), sliding_window=(None,),
           residual_in_fp32=(False,), tie_word_embeddings=(False,))  # fmt: skip
    refuse_bounds(config)
    pattern = _pattern(config)
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or heads
    return {
        "num_layers": len(pattern),
        "hybrid_layer_pattern": pattern,
        "mtp_hybrid_override_pattern": _module_pattern(config),
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": config["head_dim"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["layer_norm_epsilon"],
        "squared_relu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": config["attention_dropout"],
        "hidden_dropout": 0.0,  # which their class does not heed
        "mamba_num_heads": config["mamba_num_heads"],
        "mamba_head_dim": config["mamba_head_dim"],
        "mamba_num_groups": config["n_groups"],
        "mamba_state_dim": config["ssm_state_size"],
        "mamba_conv_kernel_dim": config["conv_kernel"],
        **(_expert_fields(config) if "E" in pattern else {}),
    }


def _pattern(config: Json) -> str:
    return _letters(config, _TYPES, config.get(_PATTERN) or "ME*-")


def _letters(config: Json, name: str, instead: str) -> str:
    """A setting of kinds of layers by our letters; `instead` where it is left out."""
    types = config[name]
    if types is None:
        types = list(instead)
    letters = {**_KINDS, **_BEFORE, **{letter: letter for letter in _KINDS.values()}}
    if not types or not letters.keys() >= set(types):
        raise ValueError(
            f"Expected {name} of config.json to be of {', '.join(_KINDS)}, got {types}: this "
            "model has something that ours have not."
        )
    return "".join(letters[kind] for kind in types)


def _module_pattern(config: Json) -> str | None:
    """That of a module; None where there is none that ours could be, of the model's own letters."""
    if not config[LAYERS_BEHIND]:
        return None
    pattern = _letters(config, _MTP_TYPES, config.get(_MTP_PATTERN) or "*E")
    return pattern if set(pattern) <= set(_pattern(config)) else None


def _begin(config: Json, k: int) -> tuple[str, ...]:
    length = len(_module_pattern(config) or "")
    return tuple(f"mtp.layers.{k * length + i}." for i in range(length))


MODULES = Modules(
    lambda config: config[LAYERS_BEHIND] if _module_pattern(config) else 0, _begin, with_ends=False
)


def _expert_fields(config: Json) -> dict[str, Any]:
    return {
        "moe_num_experts": config["n_routed_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["moe_shared_expert_intermediate_size"],
        "moe_latent_size": config["moe_latent_size"],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_score_function": "sigmoid",
        "moe_renormalize": config["norm_topk_prob"],
        "moe_router_enable_expert_bias": True,
        "moe_loss_weight": 0.0,  # their class has no such loss
        **group_fields(config, score_top=2),
    }


def nemotron_h_config(config: TrainConfig) -> dict[str, Any]:
    """Back; the pattern is told by letters too, as the code beside published files has it."""
    pattern = config.hybrid_layer_pattern or ""
    names = {letter: kind for kind, letter in _KINDS.items()}
    found = {
        _TYPES: [names[letter] for letter in pattern],
        _PATTERN: pattern,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "mlp_hidden_act": "relu2",
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": False,
    }
    if config.mamba_sizes is not None:
        names_of_sizes = (
            "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
        )  # fmt: skip
        found |= dict(zip(names_of_sizes, config.mamba_sizes, strict=True))
        found["time_step_min"] = _NO_LEAST_STEP
    if (behind := config.mtp_pattern) is not None:
        found |= {LAYERS_BEHIND: config.mtp_num_layers, _MTP_PATTERN: behind}
        found[_MTP_TYPES] = [names[letter] for letter in behind]
    if config.moe_num_experts is None:
        return found
    return found | {
        "n_routed_experts": config.moe_num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.moe_top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "norm_topk_prob": config.moe_renormalize,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    }


def nemotron_h_rules(config: TransformerConfig, *, today: bool = False) -> list[Rule]:
    """From their tensors to ours.

    Args:
        today: the experts of a layer are one tensor.
    """
    rules = _around(config, "model.")
    for of, layer, ours, theirs in _places(config, "model."):
        rules += _layer(of, layer, ours, theirs, today=today)
        if of.has_mamba(layer):
            assert of.mamba is not None
            rules += mamba_rules(of.mamba, f"{ours}attention.", f"{theirs}mixer.")
    return rules


def nemotron_h_back(_: TrainConfig, config: TransformerConfig) -> list[Rule]:
    """From ours to theirs, by the names of files."""
    back = reversed_rules(_around(config, "backbone."))
    for of, layer, ours, theirs in _places(config, "backbone."):
        back += reversed_rules(_layer(of, layer, ours, theirs, today=False))
        if of.has_mamba(layer):
            assert of.mamba is not None
            back += mamba_back(of.mamba, f"{ours}attention.", f"{theirs}mixer.")
    return back


def _places(
    config: TransformerConfig, theirs: str
) -> Iterator[tuple[TransformerConfig, int, str, str]]:
    """Of each layer: of which stack it is which, and how its names begin, ours and theirs."""
    for layer in range(config.num_layers):
        yield config, layer, f"stack.blocks.{layer}.", f"{theirs}layers.{layer}."
    module = layers_of_module(config) if config.mtp_modules else None
    for number in range(config.mtp_modules):
        assert module is not None
        for layer in range(module.num_layers):
            place = number * module.num_layers + layer
            yield module, layer, f"mtp.{number}.stack.blocks.{layer}.", f"mtp.layers.{place}."


def _around(config: TransformerConfig, theirs: str) -> list[Rule]:
    return [
        Rule("embedding.tokens.weight", (f"{theirs}embeddings.weight",)),
        Rule("stack.norm.weight", (f"{theirs}norm_f.weight",)),
        *own_head(config),
        *(rule for number in range(config.mtp_modules) for rule in _around_module(config, number)),
    ]


def _around_module(config: TransformerConfig, number: int) -> list[Rule]:
    length = len(config.mtp_pattern or "")
    first, last = number * length, number * length + length - 1
    parts = {part: f"mtp.layers.{first}.{part}" for part in ("enorm", "hnorm", "eh_proj")}
    parts["stack.norm"] = f"mtp.layers.{last}.final_layernorm"
    return module_rules(f"mtp.{number}.", parts)


def _layer(
    config: TransformerConfig, layer: int, ours: str, theirs: str, *, today: bool
) -> list[Rule]:
    """Those of a layer, but for Mamba's own."""
    norm = "norm_1" if config.has_mixer(layer) else "norm_2"
    rules = [Rule(f"{ours}{norm}.weight", (f"{theirs}norm.weight",))]
    inside = f"{theirs}mixer."
    if config.has_mamba(layer):
        return rules
    if config.has_mixer(layer):
        return rules + attention_rules(config, f"{ours}attention.", inside)
    if config.has_experts(layer):
        assert config.moe is not None
        return rules + _expert_rules(config.moe, f"{ours}mlp.", inside, today=today)
    return rules + [
        Rule(f"{ours}mlp.{part}.weight", (f"{inside}{part}_proj.weight",))
        for part in ("up", "down")
    ]


def _expert_rules(moe: MoEConfig, ours: str, theirs: str, *, today: bool) -> list[Rule]:
    rules = [
        Rule(f"{ours}router.weight", (f"{theirs}gate.weight",)),
        Rule(f"{ours}router.balancing_bias", (f"{theirs}gate.e_score_correction_bias",)),
    ]
    if moe.latent_size is not None:
        for our, their in (("down", "fc1"), ("up", "fc2")):
            of_map = (f"{theirs}{their}_latent_proj.weight",)
            rules.append(Rule(f"{ours}latent_{our}.weight", of_map))
    for our, part in (("w1", "up_proj"), ("w2", "down_proj")):
        each = [f"{theirs}experts.{expert}.{part}.weight" for expert in range(moe.num_experts)]
        target = f"{ours}experts.{our}"
        if today:
            rules.append(Rule(target, (f"{theirs}experts.{part}",)))
        else:
            rules.append(Rule(target, tuple(each), _stacked, torch.Tensor.unbind))
        shared = (f"{theirs}shared_experts.{part}.weight",)
        rules.append(Rule(f"{ours}shared_expert.{our}", shared, _stacked, torch.Tensor.unbind))
    return rules


def _stacked(*matrices: torch.Tensor) -> torch.Tensor:
    return torch.stack(matrices)
