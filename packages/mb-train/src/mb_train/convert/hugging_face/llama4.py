"""Llama 4, its text: one expert a token beside one that all visit, in all layers or some.

Its class has a weight scale an expert's input, and norms of queries and keys without weights, in
layers with positions. There a token sees no further than its chunk of the text, and where there are
no positions queries grow with their place. Models are read for texts in which neither is to be
seen, those of one chunk.
"""

from __future__ import annotations

from typing import Any

from mb_layers import MoEConfig
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig, whole
from mb_train.config.layers import every_nth_behind, told
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.decoder_rules import decoder_rules
from mb_train.convert.hugging_face.experts import ExpertNames, expert_rules
from mb_train.convert.hugging_face.llama import (
    experts_of,
    llama_config,
    llama_fields,
    loss_coefficient,
)
from mb_train.convert.hugging_face.windows import (
    FULL,
    LAYER_TYPES,
    said_of_layers,
    types_of_layers,
)
from mb_train.models.config import TransformerConfig

CHUNKED, CHUNK = "chunked_attention", "attention_chunk_size"
_CHUNK = 8192
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "attention_bias": False,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_local_experts": 16,
    "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "router_aux_loss_coef": 0.001, "no_rope_layers": None, "no_rope_layer_interval": 4,
    CHUNK: _CHUNK, LAYER_TYPES: None, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1,
}  # fmt: skip
_NAMES = ExpertNames("mlp.router", today={"router": "mlp.router"})


def llama4_fields(config: Json) -> dict[str, Any]:
    """Fields of a `TrainConfig`."""
    turned, has = _turned(config), _with_experts(config)
    decoder = llama_fields(config)
    if config["use_qk_norm"] and _lengthened(decoder):
        raise ValueError(
            "Expected rotations of config.json that leave queries and keys as long as they are, "
            "with use_qk_norm, which in its class comes behind them: ours comes before."
        )
    fields = decoder | {
        "ffn_hidden_size": config["intermediate_size_mlp"],
        "max_position_embeddings": _seen_alike(config, turned),
        "qk_l2_norm": bool(config["use_qk_norm"]),
        **said_of_layers(config, told(turned), "no_rope_freq", "rope_layers"),
    }
    if 1 not in has:
        return fields
    every = every_nth_behind(has)
    layers = {"moe_layers": has}
    if every is not None:
        layers = {"moe_layer_freq": every[0], "moe_first_k_dense": every[1]}
    return (
        fields
        | experts_of(config, "num_local_experts")
        | layers
        | {
            "moe_router_score_function": "sigmoid",
            "moe_weights_on_input": True,
            "moe_shared_expert_intermediate_size": config["intermediate_size"],
        }
    )


def _lengthened(fields: dict[str, Any]) -> bool:
    """Whether rotations make queries and keys longer, see `models.rotary`."""
    if fields.get("rope_type") == "yarn":
        return fields["rotary_scaling_factor"] > 1 and fields["mscale"] != fields["mscale_all_dim"]
    return fields.get("mscale", 1.0) != 1


def _turned(config: Json) -> list[bool]:
    """Whether each layer has positions.

    Raises:
        ValueError: less numbers than layers.
    """
    layers, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    said = config["no_rope_layers"] or [(layer + 1) % every != 0 for layer in range(layers)]
    if len(said) < layers:
        raise ValueError(
            f"Expected no_rope_layers of config.json to be 1 or 0 for each of {layers} layers, got "
            f"{said}: this model has something that ours have not."
        )
    return [bool(one) for one in said[:layers]]


def _with_experts(config: Json) -> list[int]:
    """1 for each layer with experts."""
    layers, step = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    said = config["moe_layers"]
    which = range(step - 1, layers, step) if said is None else said
    return [int(layer in which) for layer in range(layers)]


def _seen_alike(config: Json, turned: list[bool]) -> int:
    """How long a text may be that is one chunk, and whose queries do not grow."""
    positions, kinds = config["max_position_embeddings"], types_of_layers(config, CHUNKED, FULL)
    chunked = any(turned) if kinds is None else CHUNKED in kinds
    if chunked and config[CHUNK] is not None:
        positions = min(positions, config[CHUNK])
    if config["attn_temperature_tuning"] and config["attn_scale"] and not all(turned):
        positions = min(positions, config["floor_scale"] - 1)  # the token behind it is the first
    return positions


def llama4_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    layers = range(whole(config.num_layers))
    found = llama_config(config) | {
        "intermediate_size_mlp": config.ffn_size,
        "moe_layers": [],
        "use_qk_norm": config.qk_l2_norm,
        "no_rope_layers": [int(config.has_rope(layer)) for layer in layers],
        LAYER_TYPES: [FULL for _ in layers],
        CHUNK: _CHUNK,  # of no layer, but its class makes a mask of it
        "attn_temperature_tuning": False,
    }
    if config.moe_num_experts is None:
        return found
    return found | {
        "intermediate_size": config.expert_ffn_size,
        "moe_layers": [layer for layer in layers if config.has_experts(layer)],
        "num_local_experts": config.moe_num_experts,
        "num_experts_per_tok": config.moe_top_k,
        "router_aux_loss_coef": loss_coefficient(config),
    }


def llama4_rules(config: TransformerConfig) -> list[Rule]:
    """Llama's of neighbours that turn, by names of its own; all experts in one tensor."""
    rules = decoder_rules(config, _expert_rules, neighbours=True)
    named = [[name.replace(".mlp.", ".feed_forward.") for name in rule.sources] for rule in rules]
    return [rule._replace(sources=tuple(names)) for rule, names in zip(rules, named, strict=True)]


def _expert_rules(moe: MoEConfig, ours: str, theirs: str) -> list[Rule]:
    """w1 [E, 2F, D] from [E, D, 2F], w2 [E, D, F] from [E, F, D]."""
    rules = expert_rules(_NAMES.stacked(), moe, ours, theirs)
    return [
        Rule(rule.target, rule.sources, lambda rows: rows.mT, lambda rows: (rows.mT,))
        if ".experts." in rule.target
        else rule
        for rule in rules
    ]
