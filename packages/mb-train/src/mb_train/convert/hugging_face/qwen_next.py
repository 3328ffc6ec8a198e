"""Qwen3-Next and the text of Qwen3.5: layers with a state, gates, experts, norms around one.

All layers but every n-th have a state (Gated DeltaNet). Norms multiply by one more than their
weights, and ours by the sum; those of what a state returns do not. Rows of the map to queries are
[heads][query, gate]. Of layers with a state Qwen3-Next's rows are ours, by key head, and Qwen3.5's
stand apart, for which it is written as a Qwen3-Next; the convolution's do so in both.

A module for further tokens (`mtp.*`) has a layer that attends, so it is read behind a model whose
last one does.

Letters: G key heads of states, H query heads, X channels of the convolution, T its taps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.config import TrainConfig, whole
from mb_train.config.layers import every_nth_full
from mb_train.convert.grouped_rows import by_group, from_groups
from mb_train.convert.hugging_face.architecture import Modules
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import attention_rules, decoder_rules
from mb_train.convert.hugging_face.deepseek import LAYERS_BEHIND
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import (
    decoder_fields,
    llama_config,
    loss_coefficient,
    qwen_experts,
)
from mb_train.convert.hugging_face.windows import FULL, LAYER_TYPES
from mb_train.models.config import TransformerConfig

_STATE = "linear_attention"
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1,
    LAYERS_BEHIND: 1,  # files need not say so
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DEFAULTS, "num_experts_per_tok": 10, "num_experts": 512},
    "qwen3_5_moe_text": {
        **_DEFAULTS, "num_experts_per_tok": 8, "num_experts": 256,
        "intermediate_size": 5632,  # of dense layers: it has none
    },
}  # fmt: skip
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
ALIASES = {"mtp_num_hidden_layers": LAYERS_BEHIND}
# Files of the model without a head have no prefix.
RENAMED = {r"^(?!model\.|lm_head\.|mtp\.)": "model."}
# Our norms that are theirs and one.
_AROUND_ONE = re.compile(r"(.*\.norm_[12kq]|(.*\.)?stack\.norm|mtp\.\d+\.[eh]norm)\.weight")


def qwen3_next_fields(config: Json) -> dict[str, Any]:
    """Attention with gates in every n-th layer, states in the others; Qwen2's experts."""
    refuse(config, attention_bias=(False,))
    experts, shared = qwen_experts(config, "num_experts"), config["shared_expert_intermediate_size"]
    experts |= {"moe_shared_expert_intermediate_size": shared or None}
    experts |= {"moe_shared_expert_gate": bool(shared)}
    dense = experts["moe_first_k_dense"] >= config["num_hidden_layers"]
    return (
        decoder_fields(config)
        | ({} if dense else experts)
        | {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": _every_nth_attends(config),
            **{name: config[name] for name in _SIZES},
            "attention_output_gate": True,
            "qk_layernorm": True,
            "qk_layernorm_over": "head",
        }
    )


def qwen3_5_fields(config: Json) -> dict[str, Any]:
    """The same; positions in three directions are one in a text."""
    refuse(config, norm_topk_prob=(True,), mlp_only_layers=(None, []))
    return qwen3_next_fields(config)


def _every_nth_attends(config: Json) -> int | None:
    """n, or None where no layer does.

    Raises:
        ValueError: others do.
    """
    layers, types = config["num_hidden_layers"], config.get(LAYER_TYPES)
    every: int | None = config["full_attention_interval"]
    if types is not None:
        known = len(types) == layers and {_STATE, FULL}.issuperset(types)
        every = every_nth_full([kind == _STATE for kind in types]) if known else None
    if every is None:
        raise ValueError(
            f"Expected {LAYER_TYPES} of config.json to be {_STATE} for each of {layers} layers, "
            f"and {FULL} for every n-th, got {types}: this model has something that ours have not."
        )
    return None if every > layers else every


def _count_modules(config: Json) -> int:
    """One, or none where those of the files are none of ours.

    Several have one map in common, to each of their layers.
    """
    every = _every_nth_attends(config)
    attends = every is not None and config["num_hidden_layers"] % every == 0
    return int(config[LAYERS_BEHIND] == 1 and attends)


MODULES = Modules(_count_modules, lambda config, k: ("mtp.",), with_ends=False)


def _module_names(_: TransformerConfig, number: int) -> tuple[Mapping[str, str], str]:
    parts = {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc", "stack.norm": "mtp.norm",
    }  # fmt: skip
    return parts, f"mtp.layers.{number}."


def qwen3_next_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found, turned = llama_config(config), {"partial_rotary_factor": config.rotary_percent}
    found["rope_parameters"] |= turned
    layers = range(whole(config.num_layers))
    dense = len(layers) if config.moe_num_experts is None else config.moe_first_k_dense
    return (
        found
        | turned
        | {name: getattr(config, name) for name in _SIZES}
        | {
            LAYER_TYPES: [_STATE if config.has_state(layer) else FULL for layer in layers],
            "num_experts": config.moe_num_experts or 0,
            "num_experts_per_tok": config.moe_top_k,
            "moe_intermediate_size": config.expert_ffn_size,
            "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
            "norm_topk_prob": config.moe_renormalize,
            "router_aux_loss_coef": loss_coefficient(config),
            "decoder_sparse_step": 1,
            LAYERS_BEHIND: config.mtp_num_layers,
            "mlp_only_layers": list(range(dense)),
        }
    )


def qwen_next_rules(
    config: TransformerConfig, experts: ExpertRules, *, apart: bool = False
) -> list[Rule]:
    """From their tensors to ours.

    Args:
        apart: the maps of layers with a state, as in Qwen3.5.
    """
    rules = decoder_rules(config, experts, attention=partial(_attention, apart=apart),
                          module=_module_names)  # fmt: skip
    return around_one(rules)


def around_one(rules: Sequence[Rule]) -> list[Rule]:
    """The same where norms multiply by one more than their weights."""
    return [_around_one(r) if _AROUND_ONE.fullmatch(r.target) else r for r in rules]


def _around_one(rule: Rule) -> Rule:
    return rule._replace(build=lambda w: w.float() + 1, split=lambda w: (w - 1,))


def _attention(
    config: TransformerConfig, layer: int, ours: str, theirs: str, *, apart: bool
) -> list[Rule]:
    if config.has_state(layer):
        return _state_rules(config, f"{ours}attention.", f"{theirs}linear_attn.", apart=apart)
    rules = attention_rules(config, f"{ours}attention.", f"{theirs}self_attn.")
    return [_with_gates(r, config) if r.target.endswith("qkv.weight") else r for r in rules]


def _with_gates(rule: Rule, config: TransformerConfig) -> Rule:
    """The same of queries and gates that are one map."""
    build, split, H = rule.build, rule.split, config.num_heads
    assert build is not None
    assert split is not None

    def built(q_and_gate: Tensor, *others: Tensor) -> Tensor:
        q, gate = q_and_gate.unflatten(0, (H, 2, -1)).unbind(1)
        return build(q.flatten(0, 1), gate.flatten(0, 1), *others)

    def taken_apart(rows: Tensor) -> list[Tensor]:
        q, gate, *others = split(rows)
        return [by_group([q, gate], H), *others]

    q, _, *others = rule.sources
    return Rule(rule.target, (q, *others), built, taken_apart)


def _state_rules(config: TransformerConfig, ours: str, theirs: str, *, apart: bool) -> list[Rule]:
    """Those of a layer with a state."""
    assert config.delta is not None
    G, H, C, V, _ = config.delta
    R = H // G
    counts = (C, C, R * V)
    names = {
        "gates.A_log": "A_log", "gates.dt_bias": "dt_bias", "norm.weight": "norm.weight",
        "out.weight": "out_proj.weight", "qkvz.weight": "in_proj_qkvz.weight",
        "ba.weight": "in_proj_ba.weight",
    }  # fmt: skip
    rules = [Rule(f"{ours}{our}", (f"{theirs}{their}",)) for our, their in names.items()]
    rules.append(
        Rule(
            f"{ours}conv.weight",
            (f"{theirs}conv1d.weight",),
            lambda w_X1T: by_group(w_X1T.squeeze(1).split([G * n for n in counts]), G),
            lambda w_XT: (torch.cat(from_groups(w_XT, G, counts))[:, None],),
        )
    )
    if not apart:
        return rules
    qkv, z, b, a = (f"{theirs}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    by_head = {
        f"{ours}qkvz.weight": Rule(
            f"{ours}qkvz.weight",
            (qkv, z),
            lambda qkv, z: by_group([*qkv.split([G * n for n in counts]), z], G),
        ),
        f"{ours}ba.weight": Rule(f"{ours}ba.weight", (b, a), lambda *parts: by_group(parts, G)),
    }
    return [by_head.get(rule.target, rule) for rule in rules]
