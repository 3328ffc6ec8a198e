"""LFM2, dense and with experts: gated short convolutions, and attention in some layers.

A layer of theirs, a mixer and a feed-forward, is two of ours (`--hybrid-layer-pattern`). The first
feed-forwards are dense, the others experts scored by sigmoids.

Letters: H heads, into which the channels of a convolution are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.config import TrainConfig
from mb_train.convert.grouped_rows import by_group, from_groups
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import attention_rules
from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.llama import llama_config, wholly_turned
from mb_train.convert.hugging_face.rules import own_head
from mb_train.convert.hugging_face.windows import FULL, LAYER_TYPES, types_of_layers
from mb_train.models.config import TransformerConfig

_CONVOLUTION = "conv"
_KINDS = {_CONVOLUTION: "S", FULL: "*"}
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attention_dropout": 0.0, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "conv_L_cache": 3,
}  # fmt: skip
# What each class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "lfm2": {
        **_DEFAULTS, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "full_attn_idxs": None,
    },
    "lfm2_moe": {
        **_DEFAULTS, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792,
        "num_dense_layers": 2, "norm_topk_prob": True, "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
}  # fmt: skip
ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
DENSE_ALIASES = {**ALIASES, "block_ff_dim": "intermediate_size"}
# Theirs for what Llama's relatives have.
_NAMES = {
    ".mlp.": ".feed_forward.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
    "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
}  # fmt: skip


def lfm2_fields(config: Json) -> dict[str, Any]:
    """A mixer and a dense feed-forward are two layers each.

    Raises:
        ValueError: kinds of layers that are none of these, or of other layers.
    """
    layers, attending = range(config["num_hidden_layers"]), config["full_attn_idxs"]
    kinds = [FULL if attending is None or n in attending else _CONVOLUTION for n in layers]
    width = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return _fields(config, kinds, "-" * len(layers)) | {"ffn_hidden_size": width}


def lfm2_moe_fields(config: Json) -> dict[str, Any]:
    """The same with experts behind the first few layers.

    Raises:
        ValueError: as for the dense ones.
    """
    layers, dense = config["num_hidden_layers"], config["num_dense_layers"]
    feeds = ("-" * dense + "E" * layers)[:layers]
    fields = _fields(config, None, feeds)
    if "E" not in feeds:
        return fields
    return fields | {
        "moe_num_experts": config["num_experts"],
        "moe_top_k": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_renormalize": config["norm_topk_prob"],  # theirs adds 1e-6 to the sum
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_enable_expert_bias": config["use_expert_bias"],
        "moe_loss_weight": 0.0,  # their class has no such loss
    }


def _fields(config: Json, kinds: Sequence[str] | None, feeds: str) -> dict[str, Any]:
    """Of both.

    Args:
        kinds: of their layers, where the file does not say.
        feeds: the letter of each one's feed-forward.
    """
    refuse(config, conv_bias=(False,))
    kinds = types_of_layers(config, *_KINDS) or kinds
    if kinds is None:
        raise KeyError(LAYER_TYPES)
    pairs = zip((_KINDS[kind] for kind in kinds), feeds, strict=True)
    return wholly_turned(config) | {
        "num_layers": 2 * len(feeds),
        "hybrid_layer_pattern": "".join(mixer + feed for mixer, feed in pairs),
        "short_conv_kernel_dim": config["conv_L_cache"],
        "qk_layernorm": True,
        "qk_layernorm_over": "head",
    }


def lfm2_config(config: TrainConfig) -> dict[str, Any]:
    """Back, of layers in pairs; which have experts is left to `lfm2_moe_config`."""
    pattern = config.hybrid_layer_pattern or ""
    mixers, feeds = pattern[::2], pattern[1::2]
    dense = feeds.rstrip("E")
    if set(mixers) - set("S*") or dense.strip("-") or len(pattern) % 2:
        raise ValueError(
            "Hugging Face has no architecture for this model: of layers that are halves of blocks "
            "LFM2 has pairs, S or * and then, from some layer on, E, and - before, got "
            f"--hybrid-layer-pattern {pattern}."
        )
    names = {letter: kind for kind, letter in _KINDS.items()}
    return llama_config(config) | {
        "num_hidden_layers": len(mixers),
        LAYER_TYPES: [names[mixer] for mixer in mixers],
        "norm_eps": config.layernorm_epsilon,
        "conv_bias": False,
        "conv_L_cache": config.short_conv_kernel_dim,
        "intermediate_size": config.ffn_size,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe_config(config: TrainConfig) -> dict[str, Any]:
    """The same with experts."""
    feeds = (config.hybrid_layer_pattern or "")[1::2]
    return lfm2_config(config) | {
        "num_dense_layers": feeds.count("-"),
        "num_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "moe_intermediate_size": config.expert_ffn_size,
        "norm_topk_prob": config.moe_renormalize,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "use_expert_bias": config.moe_router_enable_expert_bias,
    }


def lfm2_rules(config: TransformerConfig, experts: ExpertRules) -> list[Rule]:
    """From their tensors to ours, both ways."""
    rules = [
        Rule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        Rule("stack.norm.weight", ("model.embedding_norm.weight",)),
        *own_head(config),
    ]
    for layer in range(config.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"model.layers.{layer // 2}."
        norm, their = ("norm_1", "operator") if config.has_mixer(layer) else ("norm_2", "ffn")
        rules.append(Rule(f"{ours}{norm}.weight", (f"{theirs}{their}_norm.weight",)))
        if config.has_convolution(layer):
            rules += _convolution(config.num_heads, f"{ours}attention.", f"{theirs}conv.")
        elif config.has_mixer(layer):
            found = attention_rules(config, f"{ours}attention.", f"{theirs}self_attn.")
            rules += _renamed(found, _NAMES)
        elif config.has_experts(layer):
            assert config.moe is not None
            rules += _renamed(experts(config.moe, ours, theirs), {".mlp.": _NAMES[".mlp."]})
        else:
            parts = ("gate", "up", "down")
            dense = [
                Rule(f"{ours}mlp.{part}.weight", (f"{theirs}mlp.{part}_proj.weight",))
                for part in parts
            ]
            rules += _renamed(dense, _NAMES)
    return rules


def _renamed(rules: Sequence[Rule], names: Mapping[str, str]) -> list[Rule]:
    """Rules of sources in whose names these parts have others in their place."""

    def new(name: str) -> str:
        for old, other in names.items():
            name = name.replace(old, other)
        return name

    return [rule._replace(sources=tuple(map(new, rule.sources))) for rule in rules]


def _convolution(heads: int, ours: str, theirs: str) -> list[Rule]:
    def of_heads(rows: Tensor) -> Tensor:
        return by_group(rows.chunk(3), heads)

    def kind_by_kind(rows: Tensor) -> tuple[Tensor]:
        each = len(rows) // heads // 3
        return (torch.cat(from_groups(rows, heads, (each,) * 3)),)

    return [
        Rule(f"{ours}bcx.weight", (f"{theirs}in_proj.weight",), of_heads, kind_by_kind),
        Rule(
            f"{ours}conv.weight",
            (f"{theirs}conv.weight",),
            lambda w: w.squeeze(1),
            lambda w: (w[:, None],),
        ),
        Rule(f"{ours}out.weight", (f"{theirs}out_proj.weight",)),
    ]
