"""Megatron Core's arguments, as a checkpoint holds them, to the configuration of a model.

They are what its parser left: the fields that have a flag's name here are taken over, the others
are translated as on a command line (`flags.translated`).
"""

from __future__ import annotations

import dataclasses
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Any

from mb_train.config import TrainConfig
from mb_train.config.field import flag_name, spec
from mb_train.config.model import ROWS_OF_VOCABULARY
from mb_train.config.moe import MoEFields
from mb_train.config.network import Network
from mb_train.convert.new_run import imported_config
from mb_train.flags import megatron_defaults, translated
from mb_train.flags.layer_patterns import modules_apart, pattern_of_shares, spelled_out
from mb_train.flags.refused import refusal
from mb_train.flags.settled import NO_FUSED_GELU

# Arguments that make another model of the same tensors, or of other ones.
_REFUSED = (
    "mtp_use_repeated_layer", "moe_extended_tp", "rotary_base_per_layer", "head_wise_attn_gate",
    "enable_hyper_connections", "moe_n_hash_layers",
    "moe_router_topk_limited_devices", "heterogeneous_layers_config_path",
    "retro_add_retriever", "post_self_attn_layernorm", "post_mlp_layernorm",
)  # fmt: skip
# Of models whose layers are halves of blocks.
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# Arguments that `flags.translated` translates, of those that say what a model is.
_TRANSLATED = (
    "moe_router_load_balancing_type", "moe_token_drop_policy", "moe_router_pre_softmax",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "quick_geglu",
    "glu_linear_offset", "activation_func_clamp_value", "mup_embedding_mult", "mup_output_mult",
    "scaling_recipe", "scaling_base_hidden_size", "scaling_base_head_dim",
)  # fmt: skip
# Arguments about a choice by score, which Sinkhorn's balance passes over.
_OF_SCORES = (
    "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_pre_softmax",
)  # fmt: skip
# Arguments that are on unless a flag of another name turns them off.
_TURNED_OFF = {
    "add_bias_linear": megatron_defaults.NO_BIAS,
    "bias_gelu_fusion": NO_FUSED_GELU,
}
_MIXER_EPSILON = 1e-5
_OTHERS = ("attention_dropout", "hidden_dropout", "fp32_residual_connection", "init_method_std")


def config_of(args: Namespace, names: Collection[str], tokenizer: str) -> TrainConfig:
    """The configuration of a model with these arguments.

    Args:
        names: of its tensors.
        tokenizer: by name or file.

    Raises:
        ValueError: a setting that our models have not.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    # Flags of these names mean something to us: Core's models ignore the first, and lack the other.
    for name in ("openai_gelu", "config"):
        given.pop(name, None)
    experts = bool(given.get("num_experts"))
    if not experts:  # those of experts have defaults all the same
        given = {name: value for name, value in given.items() if not name.startswith("moe_")}
    if not given.keys() & {"experimental_attention_variant", "linear_attention_type"}:
        given = {name: value for name, value in given.items() if not name.startswith("linear_")}
    if (given.get("moe_expert_capacity_factor") or 0) <= 0:  # a policy is there all the same
        given.pop("moe_token_drop_policy", None)
    _refuse(given)
    given = _with_pattern(given, any(".mixer." in name for name in names))
    if _by_sinkhorn(given):
        given = {name: value for name, value in given.items() if name not in _OF_SCORES}
    said: dict[str, Any] = {name: given[name] for name in _OTHERS if name in given}
    for f in (*dataclasses.fields(Network), *dataclasses.fields(MoEFields)):
        flags = (flag_name(f.name), *spec(f).also)
        known = [given[name] for name in map(_argument, flags) if name in given]
        for value in known[:1]:
            said[f.name] = (value or None) if spec(f).falsy_is_none else value
            if isinstance(value, str):
                said[f.name] = spec(f).said_as.get(value, value)
    said |= _of_layers(given)
    typed = [flag_name(name) for name, value in given.items() if value is not False]
    typed += [flag for name, flag in _TURNED_OFF.items() if not given.get(name, True)]
    for flag in (flag_name(name) for name in _TRANSLATED if flag_name(name) in typed):
        value = given[_argument(flag)]
        words = list(map(str, value if isinstance(value, list) else [value]))
        said[flag] = words if len(words) > 1 else words[0]
    wrong = megatron_defaults.summed_logits(typed, said)
    beside = megatron_defaults.defaults_beside(typed, said)
    meant = translated.understood(said)
    if _by_sinkhorn(given):
        told = (meant.values, meant.of_every_layer)
        wrong += megatron_defaults.beside_sinkhorn(typed, beside, *told)
    if wrong := [*wrong, *meant.wrong]:
        raise ValueError(" ".join(wrong))
    fields = {**beside, **meant.values}
    for name in ROWS_OF_VOCABULARY:
        fields.pop(name, None)
    if experts:  # in older versions routers have none, whatever the other maps have
        fields["moe_router_bias"] = any(name.endswith(".mlp.router.bias") for name in names)
    config = imported_config(fields, args.padded_vocab_size, tokenizer=tokenizer)
    return translated.with_means(config, meant.of_every_layer)


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _by_sinkhorn(given: Mapping[str, Any]) -> bool:
    return given.get(_argument(megatron_defaults.BALANCING)) in ("sinkhorn", ["sinkhorn"])


def _with_pattern(given: Mapping[str, Any], has_mamba: bool) -> dict[str, Any]:
    """The arguments with a letter for each layer, if layers are halves of blocks."""
    pattern = next((given[name] for name in _PATTERNS if given.get(name)), None)
    others = {name: value for name, value in given.items() if name not in _PATTERNS}
    if pattern is None and not has_mamba:
        return others
    if has_mamba and given.get("norm_epsilon") != _MIXER_EPSILON:
        raise ValueError(
            f"Expected --norm-epsilon {_MIXER_EPSILON} with layers of Mamba-2, whose own norms "
            f"have that in Megatron Core whatever others have, got {given.get('norm_epsilon')}."
        )
    if pattern is None:
        shares = {flag_name(name): str(value) for name, value in given.items()}
        pattern = pattern_of_shares(shares, given["num_layers"])
    pattern, modules = modules_apart(pattern)
    if modules:
        others |= {"mtp_num_layers": len(modules), "mtp_hybrid_override_pattern": modules[0]}
    return others | {_PATTERNS[0]: pattern}


def _refuse(given: Mapping[str, Any]) -> None:
    if given.get("rotary_interleaved"):
        raise ValueError(
            "Expected a model without --rotary-interleaved: rotary positions pair a head's first "
            "half with its second here, and rows are not put in that order."
        )
    for flag in (flag_name(name) for name in _REFUSED if given.get(name)):
        raise ValueError(f"Expected a model without {flag}: {refusal(flag)}.")
    others = {
        "--no-rope-freq": given.get("no_rope_freq"),
        "--position-embedding-type other than rope": given.get("position_embedding_type") != "rope",
    }
    for words in (words for words, there in others.items() if there and given.get("qk_l2_norm")):
        raise ValueError(
            f"Expected --qk-l2-norm or {words}, got both: Megatron Core has such norms in layers "
            "without rotary positions too."
        )
    if given.get("apply_residual_connection_post_layernorm"):
        raise ValueError(
            "Expected a model without --apply-residual-connection-post-layernorm, which some "
            "versions of Megatron Core ignore."
        )
    for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if size := given.get(name):
            raise ValueError(
                "Expected a gate's rows over those of what it gates, got blocks of each in turn: "
                f"{flag_name(name)} {size}."
            )
    softmax = given.get("moe_router_score_function", "softmax") == "softmax"
    alone = given.get("moe_router_topk") == 1 and softmax and not _by_sinkhorn(given)
    if alone and not given.get("moe_router_pre_softmax"):
        raise ValueError(
            "Expected --moe-router-pre-softmax with --moe-router-topk 1: without it an expert's "
            "weight is 1 in some versions of Megatron Core, and others refuse it."
        )


def _of_layers(given: Mapping[str, Any]) -> dict[str, int | list[int] | None]:
    """What is said of each layer by a list, or of a window by a pair."""
    layers: list[str] = []
    by_layer = "moe_layer_freq", "window_attn_skip_freq", "no_rope_freq", "linear_attention_freq"
    said: dict[str, int | list[int] | None] = {}
    for name in (*by_layer, "window_size"):
        if isinstance(given.get(name), (list, tuple)):
            said[name] = getattr(TrainConfig, name)  # its default, unless it is a number, too
            layers += [flag_name(name), str(given[name])]
    words, lists = spelled_out(layers)
    lists.check(given["num_layers"])
    for flag, numbers in re.findall(r"--([a-z-]+)[= ]([\d ]+)", " ".join(words)):
        each = list(map(int, numbers.split()))
        said[_argument(flag)] = each if f"--{flag}" in words else each[0]
    return said
