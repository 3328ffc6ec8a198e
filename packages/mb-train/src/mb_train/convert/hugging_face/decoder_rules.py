"""Tensors of Llama and its relatives, dense and with experts: from theirs to ours, both ways.

Letters: H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from mb_layers.state_dicts import Rule, reversed_rules
from torch import Tensor

from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.latent import latent_rules
from mb_train.convert.hugging_face.rules import both, fused_rule, own_head
from mb_train.convert.rotated_rows import as_neighbours, in_halves
from mb_train.models.config import TransformerConfig

# Those of a layer's attention, by its number in the model; the names of what is in the layer begin
# with the two words: ours, and theirs.
AttentionRules: TypeAlias = Callable[[TransformerConfig, int, str, str], list[Rule]]
# Of a module for further tokens, by its number: their names of what is around its layer, by ours,
# and how the names of the layer begin.
ModuleNames: TypeAlias = Callable[[TransformerConfig, int], tuple[Mapping[str, str], str]]
# By where norms stand, ours and theirs.
_NORMS = {
    "before": {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"},
    "output": {"norm_1": "post_attention_layernorm", "norm_2": "post_feedforward_layernorm"},
    "both": {
        "norm_1": "input_layernorm", "norm_1_out": "post_self_attn_layernorm",
        "norm_2": "post_attention_layernorm", "norm_2_out": "post_mlp_layernorm",
    },
}  # fmt: skip


def _layer_behind(config: TransformerConfig, number: int) -> tuple[Mapping[str, str], str]:
    """DeepSeek's names, which others took: all of a module is a layer behind the last."""
    theirs = f"model.layers.{config.num_layers + number}."
    parts = {part: f"{theirs}{part}" for part in ("enorm", "hnorm", "eh_proj")}
    return parts | {"stack.norm": f"{theirs}shared_head.norm"}, theirs


def decoder_rules(
    config: TransformerConfig,
    experts: ExpertRules,
    *,
    neighbours: bool = False,
    norms: Mapping[str, str] | None = None,
    attention: AttentionRules | None = None,
    module: ModuleNames = _layer_behind,
) -> list[Rule]:
    """Separate projections, and these experts.

    Args:
        neighbours: rotations turn two neighbours, see `rotated_rows`.
        norms: of a block, ours and theirs; None: as most have them.
        attention: see `AttentionRules`; None: as most have them.
        module: see `ModuleNames`.
    """
    rules = [
        Rule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        *_norm_rules(config, "stack.norm", "model.norm"),
        *own_head(config),
    ]
    if attention is None:
        attention = partial(_alike, latent_rules if config.latent is not None else
                            partial(attention_rules, neighbours=neighbours))  # fmt: skip
    last = config.num_layers - 1
    places = [
        (layer, f"stack.blocks.{layer}.", f"model.layers.{layer}.")
        for layer in range(config.num_layers)
    ]
    for number in range(config.mtp_modules):
        parts, theirs = module(config, number)
        rules += module_rules(f"mtp.{number}.", parts)
        places.append((last, f"mtp.{number}.stack.blocks.0.", theirs))
    for layer, ours, theirs in places:
        for our, their in (norms or _NORMS[config.norms]).items():
            rules += _norm_rules(config, f"{ours}{our}", f"{theirs}{their}")
        rules += attention(config, layer, ours, theirs)
        if config.has_experts(layer):
            assert config.moe is not None
            rules += experts(config.moe, ours, theirs)
        else:
            for part in ("gate", "up", "down"):
                their = f"{theirs}mlp.{part}_proj.weight"
                rules.append(Rule(f"{ours}mlp.{part}.weight", (their,)))
    return rules


def _norm_rules(config: TransformerConfig, ours: str, theirs: str) -> list[Rule]:
    return both(ours, theirs)[: 2 if config.norm == "layernorm" else 1]


def module_rules(ours: str, parts: Mapping[str, str]) -> list[Rule]:
    """Those of what is around the layers of a module for further tokens."""
    return [Rule(f"{ours}{our}.weight", (f"{their}.weight",)) for our, their in parts.items()]


def _alike(
    rules: Callable[[TransformerConfig, str, str], list[Rule]],
    config: TransformerConfig,
    layer: int,
    ours: str,
    theirs: str,
) -> list[Rule]:
    """Of layers that all have these."""
    return rules(config, f"{ours}attention.", f"{theirs}self_attn.")


def attention_rules(
    config: TransformerConfig, ours: str, theirs: str, *, neighbours: bool = False
) -> list[Rule]:
    """Those of an attention with separate projections, gates among them."""
    rules = both(f"{ours}out", f"{theirs}o_proj")[: 2 if config.bias else 1]
    normed = config.qk_norm not in ("none", "l2")  # with weights
    names = {"norm_q": "q_norm", "norm_k": "k_norm"} if normed else {}
    rules += [
        Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)) for our, their in names.items()
    ]
    if config.softmax == "learnable":
        rules.append(Rule(f"{ours}sinks", (f"{theirs}sinks",)))
    H, G = config.num_heads, config.num_kv_heads
    maps = {"q": H // G, "gate": H // G, "k": 1, "v": 1}  # heads of a group
    if not config.output_gate:
        del maps["gate"]
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        parts = [f"{theirs}{part}_proj.{kind}" for part in maps]
        rule = fused_rule(f"{ours}qkv.{kind}", parts, G, tuple(maps.values()))
        rules.append(_of_neighbours(rule, config) if neighbours else rule)
    return rules


def _of_neighbours(rule: Rule, config: TransformerConfig) -> Rule:
    """The same where the rows of queries and keys are turned two by two."""
    assert not config.output_gate
    build, split = rule.build, rule.split
    assert build is not None
    assert split is not None
    heads = config.num_heads, config.num_kv_heads

    def moved(move: Callable[..., Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        *turned, value = parts
        by_head = zip(turned, heads, strict=True)
        return [*(move(rows, n, config.rotated_size, first=True) for rows, n in by_head), value]

    return rule._replace(
        build=lambda *parts: build(*moved(in_halves, parts)),
        split=lambda rows: moved(as_neighbours, split(rows)),
    )


def gate_over_up(rules: Sequence[Rule]) -> list[Rule]:
    """The same where the gate of a dense layer and what it gates are one matrix.

    Each is a part of it, see `shared` of `Translation`; `gate_over_up_back` is the way back.
    """
    found = []
    for rule in rules:
        for half, part in enumerate(("gate", "up")):
            if rule.target.endswith(f"mlp.{part}.weight"):
                both = (rule.sources[0].replace(f"{part}_proj", "gate_up_proj"),)
                rule = Rule(rule.target, both, lambda rows, half=half: rows.chunk(2)[half])
        found.append(rule)
    return found


def gate_over_up_back(rules: Sequence[Rule]) -> list[Rule]:
    """From our tensors to theirs, of the rules that `gate_over_up` takes."""
    found = []
    for rule in reversed_rules(rules):
        if rule.target.endswith(".mlp.gate_proj.weight"):
            parts = (rule.sources[0], rule.sources[0].replace(".mlp.gate.", ".mlp.up."))
            rule = Rule(rule.target.replace("gate_proj", "gate_up_proj"), parts, _over)
        if not rule.target.endswith(".mlp.up_proj.weight"):
            found.append(rule)
    return found


def _over(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up])
