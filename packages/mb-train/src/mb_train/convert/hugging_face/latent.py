"""Tensors of DeepSeek's latent attention: from theirs to ours, both ways.

They are the same matrices, but for the rows that are rotated: theirs turn neighbours, ours a row of
the first half with one of the second.

Letters: H heads, N channels of a head's query without position, P rotated ones, R rank of the
latent of keys and values.
"""

from __future__ import annotations

from mb_layers.state_dicts import Rule
from torch import Tensor

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
                    lambda rows, n=groups: _in_halves(rows, n, P),
                    lambda rows, n=groups: (_as_neighbours(rows, n, P),),
                )
            )
    return rules


def _in_halves(rows: Tensor, groups: int, turned: int) -> Tensor:
    """Rows [groups][others, P]: the P, (0, 1), (2, 3), ..., as 0, 2, ..., 1, 3, ..."""
    return _rearranged(rows, groups, turned, (-1, 2))


def _as_neighbours(rows: Tensor, groups: int, turned: int) -> Tensor:
    """The inverse of `_in_halves`."""
    return _rearranged(rows, groups, turned, (2, -1))


def _rearranged(rows: Tensor, groups: int, turned: int, sizes: tuple[int, int]) -> Tensor:
    found = rows.unflatten(0, (groups, -1)).clone()
    found[:, -turned:] = found[:, -turned:].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return found.flatten(0, 1)
