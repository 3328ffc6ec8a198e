"""Tensors of Llama and its relatives, dense and with experts: from theirs to ours, both ways.

Letters: H query heads, G key-value heads, C width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.convert.hugging_face.experts import ExpertRules
from mb_train.convert.hugging_face.latent import latent_rules
from mb_train.convert.hugging_face.rules import both, fused_rule, own_head
from mb_train.convert.rotated_rows import as_neighbours, in_halves
from mb_train.models.config import TransformerConfig


def decoder_rules(
    config: TransformerConfig, experts: ExpertRules, *, neighbours: bool = False
) -> list[Rule]:
    """Separate projections, and these experts.

    Args:
        neighbours: rotations of whole heads turn two neighbours, see `rotated_rows`.
    """
    rules = [
        Rule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        Rule("stack.norm.weight", ("model.norm.weight",)),
        *own_head(config),
    ]
    attention_rules = partial(_attention_rules, neighbours=neighbours)
    if config.latent is not None:
        attention_rules = latent_rules
    last = config.num_layers - 1
    places = [(layer, f"stack.blocks.{layer}.", layer) for layer in range(config.num_layers)]
    for number in range(config.mtp_modules):
        rules += _module_rules(f"mtp.{number}.", f"model.layers.{last + 1 + number}.")
        places.append((last, f"mtp.{number}.stack.blocks.0.", last + 1 + number))
    for layer, ours, number in places:
        theirs = f"model.layers.{number}."
        names = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
        for our, their in names.items():
            rules.append(Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)))
        rules += attention_rules(config, f"{ours}attention.", f"{theirs}self_attn.")
        if config.has_experts(layer):
            assert config.moe is not None
            rules += experts(config.moe, ours, theirs)
        else:
            for part in ("gate", "up", "down"):
                their = f"{theirs}mlp.{part}_proj.weight"
                rules.append(Rule(f"{ours}mlp.{part}.weight", (their,)))
    return rules


def _module_rules(ours: str, theirs: str) -> list[Rule]:
    """Those of a module for further tokens, but for its layer: DeepSeek's, which others took."""
    names = {part: part for part in ("enorm", "hnorm", "eh_proj")}
    names["stack.norm"] = "shared_head.norm"
    return [
        Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)) for our, their in names.items()
    ]


def _attention_rules(
    config: TransformerConfig, ours: str, theirs: str, *, neighbours: bool
) -> list[Rule]:
    rules = both(f"{ours}out", f"{theirs}o_proj")[: 2 if config.bias else 1]
    names = {"norm_q": "q_norm", "norm_k": "k_norm"} if config.qk_norm != "none" else {}
    rules += [
        Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)) for our, their in names.items()
    ]
    if config.softmax == "learnable":
        rules.append(Rule(f"{ours}sinks", (f"{theirs}sinks",)))
    H, G = config.num_heads, config.num_kv_heads
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        parts = [f"{theirs}{part}_proj.{kind}" for part in "qkv"]
        rule = fused_rule(f"{ours}qkv.{kind}", parts, G, (H // G, 1, 1))
        rules.append(_of_neighbours(rule, config) if neighbours else rule)
    return rules


def _of_neighbours(rule: Rule, config: TransformerConfig) -> Rule:
    """The same where the rows of queries and keys are turned two by two."""
    build, split, C = rule.build, rule.split, config.head_size
    assert build is not None
    assert split is not None
    heads = config.num_heads, config.num_kv_heads

    def moved(move: Callable[[Tensor, int, int], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        *turned, value = parts
        return [*(move(rows, n, C) for rows, n in zip(turned, heads, strict=True)), value]

    return rule._replace(
        build=lambda *parts: build(*moved(in_halves, parts)),
        split=lambda rows: moved(as_neighbours, split(rows)),
    )
