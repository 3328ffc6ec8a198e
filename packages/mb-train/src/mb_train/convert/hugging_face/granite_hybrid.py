"""Granite 4: Granite's multipliers, layers of Mamba-2 beside attention, an expert for all tokens.

A layer of theirs, a mixer and a feed-forward, is two of ours (`--hybrid-layer-pattern`). Without
experts the feed-forward is the one that all tokens visit.

Letters: L their layers.
"""

from __future__ import annotations

from typing import Any

import torch
from mb_layers.state_dicts import Rule, reversed_rules

from mb_train.config import TrainConfig, whole
from mb_train.convert.hugging_face import granite
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.decoder_rules import attention_rules
from mb_train.convert.hugging_face.mamba_rules import mamba_back, mamba_rules, refuse_bounds
from mb_train.convert.hugging_face.rules import own_head
from mb_train.convert.hugging_face.windows import FULL, LAYER_TYPES, types_of_layers
from mb_train.models.config import TransformerConfig

_STATE = "linear_attention"
_KINDS = {_STATE: "M", "mamba": "M", FULL: "*", "attention": "*"}  # of today, and before
# What the class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **granite.DEFAULTS["granitemoeshared"], "shared_intermediate_size": 1024,
        "position_embedding_type": None, "mamba_n_heads": 128, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
}  # fmt: skip
ALIASES = {**granite.ALIASES, "layers_block_type": LAYER_TYPES}


def granite_hybrid_fields(config: Json) -> dict[str, Any]:
    """Those of a Granite, each of whose layers is two of ours."""
    refuse(config, mamba_conv_bias=(True,), mamba_proj_bias=(False,))
    refuse_bounds(config)
    turned, experts = config["position_embedding_type"] == "rope", config["num_local_experts"]
    mixers = _mixers(config)
    fields = (
        granite.granite_moe_shared_fields(config) if experts else granite.granite_fields(config)
    )
    if not experts:
        fields["ffn_hidden_size"] = config["shared_intermediate_size"]
    if "M" in mixers:
        heads, width = config["mamba_n_heads"], config["mamba_d_head"]
        wide = config["mamba_expand"] * config["hidden_size"]
        fields |= {
            "mamba_num_heads": heads,
            "mamba_head_dim": wide // heads if width == "auto" else width,
            "mamba_num_groups": config["mamba_n_groups"],
            "mamba_state_dim": config["mamba_d_state"],
            "mamba_conv_kernel_dim": config["mamba_d_conv"],
        }
    return fields | {
        "num_layers": 2 * len(mixers),
        "hybrid_layer_pattern": "".join(mixer + ("E" if experts else "-") for mixer in mixers),
        "position_embedding_type": "rope" if turned else "none",
    }


def _mixers(config: Json) -> str:
    """A letter for each of their layers.

    Raises:
        ValueError: kinds of layers that are none of these, or of other layers.
    """
    types = types_of_layers(config, _STATE, FULL, before=_KINDS)
    types = [_STATE] * config["num_hidden_layers"] if types is None else types
    return "".join(_KINDS[kind] for kind in types)


def granite_hybrid_config(config: TrainConfig) -> dict[str, Any]:
    """Back, of layers in pairs."""
    pattern = config.hybrid_layer_pattern or ""
    mixers, feeds = pattern[::2], pattern[1::2]
    if set(mixers) - set("M*") or set(feeds) not in ({"-"}, {"E"}) or len(pattern) % 2:
        raise ValueError(
            "Hugging Face has no architecture for this model: of layers that are halves of blocks "
            "Granite 4 has pairs, M or * and then, in all of them, - or E, got "
            f"--hybrid-layer-pattern {pattern}."
        )
    if config.moe_num_experts is None:
        found = granite.granite_config(config) | {
            "num_local_experts": 0,
            "shared_intermediate_size": config.ffn_size,
        }
    else:
        found = granite.granite_moe_shared_config(config)
    turned = config.position_embedding_type == "rope"
    return (
        found
        | _mamba_config(config)
        | {
            "num_hidden_layers": len(mixers),
            LAYER_TYPES: [_STATE if mixer == "M" else FULL for mixer in mixers],
            "position_embedding_type": "rope" if turned else None,
        }
    )


def _mamba_config(config: TrainConfig) -> dict[str, Any]:
    """Sizes of Mamba layers; the class wants some without such layers too."""
    if config.mamba_sizes is None:
        return {"mamba_n_heads": 1}
    heads, width, groups, state, taps = config.mamba_sizes
    expand, rest = divmod(heads * width, whole(config.hidden_size))
    if rest:
        raise ValueError(
            "Hugging Face has no architecture for this model: Granite 4 wants heads of Mamba "
            f"layers that are together a multiple of --hidden-size {config.hidden_size} wide, got "
            f"{heads} of {width}."
        )
    return {
        "mamba_n_heads": heads, "mamba_d_head": width, "mamba_expand": expand,
        "mamba_n_groups": groups, "mamba_d_state": state, "mamba_d_conv": taps,
    }  # fmt: skip


def granite_hybrid_rules(config: TransformerConfig, *, today: bool = False) -> list[Rule]:
    """From their tensors to ours.

    Args:
        today: experts by the names within transformers 5's model, not by those of files.
    """
    return _around(config) + [
        rule for layer in range(config.num_layers) for rule in _layer(config, layer, today=today)
    ]


def granite_hybrid_back(_: TrainConfig, config: TransformerConfig) -> list[Rule]:
    """From ours to theirs."""
    back = reversed_rules(_around(config))
    for layer in range(config.num_layers):
        ours, theirs = _places(layer)
        if config.has_mamba(layer):
            assert config.mamba is not None
            back += reversed_rules(_norm(config, layer))
            back += mamba_back(config.mamba, f"{ours}attention.", f"{theirs}mamba.")
        elif config.has_feed_forward(layer) and not config.has_experts(layer):
            back += reversed_rules(_norm(config, layer))
            halves = (f"{ours}mlp.gate.weight", f"{ours}mlp.up.weight")
            both = f"{theirs}shared_mlp.input_linear.weight"
            back.append(Rule(both, halves, lambda gate, up: torch.cat([gate, up])))
            down = f"{theirs}shared_mlp.output_linear.weight"
            back.append(Rule(down, (f"{ours}mlp.down.weight",)))
        else:
            back += reversed_rules(_layer(config, layer, today=False))
    return back


def _around(config: TransformerConfig) -> list[Rule]:
    return [
        Rule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        Rule("stack.norm.weight", ("model.norm.weight",)),
        *own_head(config),
    ]


def _places(layer: int) -> tuple[str, str]:
    """How the names of a layer's tensors begin, ours and theirs."""
    return f"stack.blocks.{layer}.", f"model.layers.{layer // 2}."


def _norm(config: TransformerConfig, layer: int) -> list[Rule]:
    ours, theirs = _places(layer)
    if config.has_mixer(layer):
        return [Rule(f"{ours}norm_1.weight", (f"{theirs}input_layernorm.weight",))]
    return [Rule(f"{ours}norm_2.weight", (f"{theirs}post_attention_layernorm.weight",))]


def _layer(config: TransformerConfig, layer: int, *, today: bool) -> list[Rule]:
    ours, theirs = _places(layer)
    rules = _norm(config, layer)
    if config.has_mamba(layer):
        assert config.mamba is not None
        return rules + mamba_rules(config.mamba, f"{ours}attention.", f"{theirs}mamba.")
    if config.has_mixer(layer):
        return rules + attention_rules(config, f"{ours}attention.", f"{theirs}self_attn.")
    if config.has_experts(layer):
        assert config.moe is not None
        return rules + granite.expert_rules(config.moe, ours, theirs, today=today)
    both = (f"{theirs}shared_mlp.input_linear.weight",)
    return [
        *rules,
        Rule(f"{ours}mlp.gate.weight", both, lambda rows: rows.chunk(2)[0]),
        Rule(f"{ours}mlp.up.weight", both, lambda rows: rows.chunk(2)[1]),
        Rule(f"{ours}mlp.down.weight", (f"{theirs}shared_mlp.output_linear.weight",)),
    ]
