"""DBRX: its configuration and its tensors, and ours, both ways.

A Mixtral with layer norms that have no bias, and with queries, keys and values that are clipped.
MegaBlocks trained it, whose names its experts have.

Letters: H query heads, G key-value heads, C width of a head, D hidden, E experts, F their width.
"""

from __future__ import annotations

from typing import Any

import torch
from mb_layers.state_dicts import Rule

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.llama import (
    experts_of,
    llama_config,
    loss_coefficient,
    rope_of,
    wholly_turned,
)
from mb_train.convert.hugging_face.rules import apart, interleaved, own_head
from mb_train.models.config import TransformerConfig

# Settings of the model that stand among those of its parts, and by the names of others.
INSIDE = ("attn_config", "ffn_config")
ALIASES = {
    "n_layers": "num_hidden_layers", "d_model": "hidden_size", "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings", "kv_n_heads": "num_key_value_heads",
    "attn_pdrop": "attention_dropout", "ffn_hidden_size": "intermediate_size",
    "moe_num_experts": "num_local_experts", "moe_top_k": "num_experts_per_tok",
    "moe_loss_weight": "router_aux_loss_coef", "moe_jitter_eps": "router_jitter_noise",
}  # fmt: skip
_EPSILON = 1e-5  # of norms, which no setting changes
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": _EPSILON,  # which it has not
    "num_key_value_heads": 1, "clip_qkv": None, "rope_theta": 10_000.0, "attention_dropout": 0.0,
    "resid_pdrop": 0.0, "intermediate_size": 3584, "num_local_experts": 4, "num_experts_per_tok": 1,
    "router_aux_loss_coef": 0.01, "moe_normalize_expert_weights": 1.0,
    "tie_word_embeddings": False,
    "embd_pdrop": 0.0,  # it has none, whatever its emb_pdrop says, see `read._settings_left_out`
}  # fmt: skip


def dbrx_fields(config: Json) -> dict[str, Any]:
    """Fields of a `TrainConfig`."""
    refuse(
        config,
        ffn_act_fn=(None, {"name": "silu"}),
        tie_word_embeddings=(False,),
        moe_normalize_expert_weights=(None, 1, 2),
    )
    width, clip = config["hidden_size"] // config["num_attention_heads"], config["clip_qkv"]
    refuse(config, head_dim=(None, width))
    rope = rope_of(config)
    first, second = (config.get("attn_config") or {}).get("rope_theta"), rope.get("rope_theta")
    # What was published has the first alone; transformers 5 turns by the second alone, and writes
    # one that the first says nothing to.
    if None not in (first, second) and first != second:
        raise ValueError(
            "Expected rope_theta of attn_config and of rope_parameters in config.json to be alike, "
            f"got {first} and {second}. Leave out the one that the model was not trained with."
        )
    p = config["moe_normalize_expert_weights"]
    return (
        wholly_turned(config, rope)
        | experts_of(config, "num_local_experts")
        | {
            "normalization": "LayerNorm-without-bias",
            "layernorm_epsilon": _EPSILON,
            "clip_qkv": None if clip is None else float(clip),
            "hidden_dropout": config["resid_pdrop"],
            "moe_renormalize": p is not None,
            "moe_renormalize_p": float(p or 1),
        }
    )


def dbrx_config(config: TrainConfig) -> dict[str, Any]:
    """Back.

    Raises:
        ValueError: a model that does not clip, with which their class cannot compute.
    """
    if config.clip_qkv is None:
        raise ValueError(
            "Hugging Face has no architecture for this model: the nearest, DbrxForCausalLM, clips "
            "queries, keys and values (--clip-qkv), got none."
        )
    llama = llama_config(config)
    p = config.moe_renormalize_p if config.moe_renormalize else None
    return {
        "n_layers": config.num_layers,
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "max_seq_len": config.positions,
        "resid_pdrop": config.hidden_dropout,
        "emb_pdrop": 0.0,
        "rope_parameters": llama["rope_parameters"],
        "tie_word_embeddings": False,
        "attn_config": {
            "kv_n_heads": config.kv_heads,
            "clip_qkv": config.clip_qkv,
            "attn_pdrop": config.attention_dropout,
            "rope_theta": config.rotary_base,
        },
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": config.expert_ffn_size,
            "moe_num_experts": config.moe_num_experts,
            "moe_top_k": config.moe_top_k,
            "moe_loss_weight": loss_coefficient(config),
            "moe_normalize_expert_weights": p,
        },
    }


def dbrx_rules(config: TransformerConfig) -> list[Rule]:
    """Fused projections, and the experts of a layer one below the other."""
    rules = [
        Rule("embedding.tokens.weight", ("transformer.wte.weight",)),
        Rule("stack.norm.weight", ("transformer.norm_f.weight",)),
        *own_head(config),
    ]
    H, G, C = config.num_heads, config.num_kv_heads, config.head_size
    heads = (H // G, 1, 1)
    names = {
        "norm_1": "norm_attn_norm.norm_1", "norm_2": "norm_attn_norm.norm_2",
        "attention.out": "norm_attn_norm.attn.out_proj", "mlp.router": "ffn.router.layer",
    }  # fmt: skip
    for layer in range(config.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"transformer.blocks.{layer}."
        rules += [
            Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",))
            for our, their in names.items()
        ]
        rules.append(
            Rule(
                f"{ours}attention.qkv.weight",
                (f"{theirs}norm_attn_norm.attn.Wqkv.weight",),
                lambda rows: interleaved(rows.split([H * C, G * C, G * C]), G, heads),
                lambda rows: [torch.cat(apart(rows, G, heads))],
            )
        )
        if config.has_experts(layer):
            assert config.moe is not None
            rules += _expert_rules(config.moe.num_experts, ours, theirs)
    return rules


def _expert_rules(num_experts: int, ours: str, theirs: str) -> list[Rule]:
    """w1 [E, 2F, D] from the gates' rows [E * F, D] and the like of what they gate; w2 [E, D, F]
    from [E * F, D]."""
    theirs = f"{theirs}ffn.experts.mlp."
    by_expert = (num_experts, -1)
    return [
        Rule(
            f"{ours}mlp.experts.w1",
            (f"{theirs}w1", f"{theirs}v1"),
            lambda *parts: torch.cat([rows.unflatten(0, by_expert) for rows in parts], 1),
            lambda w1: [half.flatten(0, 1) for half in w1.chunk(2, dim=1)],
        ),
        Rule(
            f"{ours}mlp.experts.w2",
            (f"{theirs}w2",),
            lambda rows: rows.unflatten(0, by_expert).mT,
            lambda w2: [w2.mT.flatten(0, 1)],
        ),
    ]
