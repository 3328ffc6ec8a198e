"""Rules from Hugging Face's tensors to ours, both ways: what several architectures share.

Our names, of layer N of a GPT:

    embedding.tokens.weight, embedding.positions.weight, stack.norm.*, head.weight
    stack.blocks.N.norm_1.*, norm_2.*
    stack.blocks.N.attention.qkv.*      rows by key-value group: query heads, (gates,) key, value
    stack.blocks.N.attention.out.*, norm_q.weight, norm_k.weight
    stack.blocks.N.mlp.up.*, gate.*, down.*                            a dense layer
    stack.blocks.N.mlp.router.weight, experts.w1 [E, 2F, D], experts.w2 [E, D, F]

Letters: D hidden, C width of a head, E experts, F their width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.models.config import TransformerConfig


def both(ours: str, theirs: str) -> list[Rule]:
    """Weight and bias of a module."""
    return [Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",)) for kind in ("weight", "bias")]


def own_head(config: TransformerConfig) -> list[Rule]:
    """Those of a head: its weight, where it is not the embedding's, and its bias, if it has one."""
    weight = [] if config.tie_embeddings else [Rule("head.weight", ("lm_head.weight",))]
    return [*weight, Rule("head_bias", ("lm_head.bias",))] if config.head_bias else weight


def fused_rule(target: str, sources: Sequence[str], groups: int, counts: Sequence[int]) -> Rule:
    """Separate maps as the rows of one, see `interleaved`."""
    return Rule(
        target,
        tuple(sources),
        lambda *parts: interleaved(parts, groups, counts),
        lambda rows: apart(rows, groups, counts),
    )


def interleaved(parts: Sequence[Tensor], groups: int, counts: Sequence[int]) -> Tensor:
    """Parts of `counts` heads a group, rows [groups][heads][C] each: as [groups][all heads][C]."""
    split = [t.unflatten(0, (groups, n, -1)) for t, n in zip(parts, counts, strict=True)]
    return torch.cat(split, dim=1).flatten(0, 2)


def apart(rows: Tensor, groups: int, counts: Sequence[int]) -> list[Tensor]:
    """The inverse of `interleaved`."""
    parts = rows.unflatten(0, (groups, sum(counts), -1)).split(list(counts), dim=1)
    return [part.flatten(0, 2) for part in parts]
