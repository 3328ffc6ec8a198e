"""Tensors of DeepSeek's latent attention: from theirs to ours, both ways.

They are the same matrices, but for the rows that are rotated, see `rotated_rows`.
"""

from __future__ import annotations

from mb_layers.state_dicts import Rule

from mb_train.convert.rotated_rows import as_neighbours, in_halves
from mb_train.models.config import TransformerConfig


def latent_rules(config: TransformerConfig, ours: str, theirs: str) -> list[Rule]:
    """Those of a layer, whose names begin with `ours` and `theirs`."""
    assert config.latent is not None
    names = {"kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj"}
    queries = {"q": "q_proj"}
    if config.latent.q_rank is not None:
        names |= {"q_down": "q_a_proj", "q_norm": "q_a_layernorm"}
        queries = {"q_up": "q_b_proj"}
    rules = [
        Rule(f"{ours}{our}.weight", (f"{theirs}{their}.weight",)) for our, their in names.items()
    ]
    P = config.latent.rotated
    for groups, maps in ((config.num_heads, queries), (1, {"kv_down": "kv_a_proj_with_mqa"})):
        for our, their in maps.items():
            rules.append(
                Rule(
                    f"{ours}{our}.weight",
                    (f"{theirs}{their}.weight",),
                    lambda rows, n=groups: in_halves(rows, n, P),
                    lambda rows, n=groups: (as_neighbours(rows, n, P),),
                )
            )
    return rules
