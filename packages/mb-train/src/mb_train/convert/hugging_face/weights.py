"""The tensors of a GPT by our names and by Hugging Face's, as rules that work both ways.

Ours, of layer N:

    embedding.tokens.weight, embedding.positions.weight, stack.norm.*, head.weight
    stack.blocks.N.norm_1.*, norm_2.*
    stack.blocks.N.attention.qkv.*      rows by key-value group: its query heads, key, value
    stack.blocks.N.attention.out.*, norm_q.weight, norm_k.weight
    stack.blocks.N.mlp.up.*, gate.*, down.*                            a dense layer
    stack.blocks.N.mlp.router.weight, experts.w1 [E, 2F, D], experts.w2 [E, D, F]

Letters: D hidden, H query heads, G key-value heads, C width of a head, E experts, F their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.models.config import TransformerConfig


@dataclass(frozen=True)
class ExpertNames:
    """Where an architecture keeps its experts: names within a layer."""

    router: str
    gate: str
    up: str
    down: str


MIXTRAL = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
LLAMA = ExpertNames(
    "mlp.gate",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
)


def gpt2_rules(config: TransformerConfig) -> list[Rule]:
    """GPT-2: fused projections, stored [inputs, outputs]; names without "transformer."."""
    rules = [
        Rule("embedding.tokens.weight", ("wte.weight",)),
        Rule("embedding.positions.weight", ("wpe.weight",)),
        *both("stack.norm", "ln_f"),
        *_head(config),
    ]
    H = config.num_heads
    for layer in range(config.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"h.{layer}."
        rules += both(f"{ours}norm_1", f"{theirs}ln_1") + both(f"{ours}norm_2", f"{theirs}ln_2")
        for kind in ("weight", "bias"):
            rules.append(
                Rule(
                    f"{ours}attention.qkv.{kind}",
                    (f"{theirs}attn.c_attn.{kind}",),
                    lambda t: _interleaved(_turned(t).chunk(3), H, (1, 1, 1)),
                    lambda t: [_turned(torch.cat(_apart(t, H, (1, 1, 1))))],
                )
            )
            for our, their in (
                ("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):  # fmt: skip
                rules.append(
                    Rule(
                        f"{ours}{our}.{kind}", (f"{theirs}{their}.{kind}",),
                        _turned, lambda t: [_turned(t)],
                    )
                )  # fmt: skip
    return rules


def llama_like_rules(config: TransformerConfig, experts: ExpertNames | None) -> list[Rule]:
    """Llama and its relatives: separate projections, a matrix for each expert or, None, for all.

    All in one is what transformers 5 computes with, and writes if asked for (`save_original_format`
    False) or for models that it holds on a disk.
    """
    rules = [
        Rule("embedding.tokens.weight", ("model.embed_tokens.weight",)),
        Rule("stack.norm.weight", ("model.norm.weight",)),
        *_head(config),
    ]
    H, G = config.num_heads, config.num_kv_heads
    for layer in range(config.num_layers):
        ours, theirs = f"stack.blocks.{layer}.", f"model.layers.{layer}."
        names = {
            "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm",
            "attention.out": "self_attn.o_proj",
        }  # fmt: skip
        if config.qk_norm != "none":
            names |= {
                "attention.norm_q": "self_attn.q_norm",
                "attention.norm_k": "self_attn.k_norm",
            }
        for our, their in names.items():
            rules.append(Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)))
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv"]
            rules.append(fused_rule(f"{ours}attention.qkv.{kind}", parts, G, (H // G, 1, 1)))
        if config.has_experts(layer):
            rules += _expert_rules(config, experts, ours, theirs)
        else:
            for part in ("gate", "up", "down"):
                their = f"{theirs}mlp.{part}_proj.weight"
                rules.append(Rule(f"{ours}mlp.{part}.weight", (their,)))
    return rules


def _head(config: TransformerConfig) -> list[Rule]:
    return [] if config.tie_embeddings else [Rule("head.weight", ("lm_head.weight",))]


def _expert_rules(
    config: TransformerConfig, names: ExpertNames | None, ours: str, theirs: str
) -> list[Rule]:
    assert config.moe is not None
    router = LLAMA.router if names is None else names.router
    rules = [Rule(f"{ours}mlp.router.weight", (f"{theirs}{router}.weight",))]
    if names is None:
        rules += [
            Rule(f"{ours}mlp.experts.{our}", (f"{theirs}mlp.experts.{their}",))
            for our, their in (("w1", "gate_up_proj"), ("w2", "down_proj"))
        ]
    else:
        parts = (names.gate, names.up, names.down)
        experts = [
            tuple(f"{theirs}{part.format(expert)}.weight" for part in parts)
            for expert in range(config.moe.num_experts)
        ]
        rules += _stack_rules(f"{ours}mlp.experts", experts)
    if config.moe.shared_expert_hidden_size is not None:  # only Qwen2-MoE has one, with a gate
        shared = [
            tuple(
                f"{theirs}mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")
            )
        ]
        gate = f"{theirs}mlp.shared_expert_gate.weight"
        rules += _stack_rules(f"{ours}mlp.shared_expert", shared)
        rules.append(Rule(f"{ours}mlp.shared_expert.gate", (gate,)))
    return rules


def _stack_rules(ours: str, experts: list[tuple[str, ...]]) -> list[Rule]:
    """w1 [E, 2F, D] and w2 [E, D, F] from the (gate, up, down) of each expert."""
    return [
        Rule(
            f"{ours}.w1",
            tuple(name for gate, up, _ in experts for name in (gate, up)),
            lambda *parts: torch.stack(parts).unflatten(0, (-1, 2)).flatten(1, 2),
            lambda w1: w1.unflatten(1, (2, -1)).flatten(0, 1).unbind(),
        ),
        Rule(
            f"{ours}.w2",
            tuple(down for *_, down in experts),
            lambda *parts: torch.stack(parts),
            lambda w2: w2.unbind(),
        ),
    ]


def both(ours: str, theirs: str) -> list[Rule]:
    """Weight and bias of a module."""
    return [Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias")]


def _turned(tensor: Tensor) -> Tensor:
    """A matrix the other way round; a vector as it is."""
    return tensor.t() if tensor.ndim == 2 else tensor


def fused_rule(target: str, sources: Sequence[str], groups: int, counts: Sequence[int]) -> Rule:
    """Separate maps as the rows of one, see `_interleaved`."""
    return Rule(
        target,
        tuple(sources),
        lambda *parts: _interleaved(parts, groups, counts),
        lambda rows: _apart(rows, groups, counts),
    )


def _interleaved(parts: Sequence[Tensor], groups: int, counts: Sequence[int]) -> Tensor:
    """Parts of `counts` heads a group, rows [groups][heads][C] each: as [groups][all heads][C]."""
    split = [t.unflatten(0, (groups, n, -1)) for t, n in zip(parts, counts, strict=True)]
    return torch.cat(split, dim=1).flatten(0, 2)


def _apart(rows: Tensor, groups: int, counts: Sequence[int]) -> list[Tensor]:
    """The inverse of `_interleaved`."""
    parts = rows.unflatten(0, (groups, sum(counts), -1)).split(list(counts), dim=1)
    return [part.flatten(0, 2) for part in parts]
