"""Layers of Mamba-2 in the files of others: from their tensors to ours, both ways.

Theirs are mamba-ssm's: one map to [z, x, b, c, dt], of which ours are three, and one convolution of
[x, b, c], of which ours are two, by head and by group.

Letters: H heads, G groups, P width of a head, N of the state's keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from mb_layers.state_dicts import Rule
from torch import Tensor

from mb_train.convert.grouped_rows import by_group, from_groups
from mb_train.convert.hugging_face.config_json import Json
from mb_train.models.config import MambaSizes

_SAME = {
    "gates.A_log": "A_log", "gates.D": "D", "gates.dt_bias": "dt_bias",
    "norm.weight": "norm.weight", "out.weight": "out_proj.weight",
}  # fmt: skip
_UNBOUNDED = (math.inf, {"__float__": "Infinity"})  # as transformers writes it, and JSON


def refuse_bounds(config: Json) -> None:
    """Raise ValueError for steps that are held within bounds."""
    limit = config.get("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] != 0 or limit[1] not in _UNBOUNDED):
        raise ValueError(
            f"Expected time_step_limit of config.json to be no limit, got {limit}: this model has "
            "something that ours have not."
        )


def mamba_rules(sizes: MambaSizes, ours: str, theirs: str) -> list[Rule]:
    """From theirs to ours; several of ours are parts of one of theirs."""
    H, P, G, N, _ = sizes
    wide, common = H * P, G * N
    rows, channels = [wide, wide, common, common, H], [wide, common, common]
    into = (f"{theirs}in_proj.weight",)

    def of_map(*parts: int, groups: int) -> Any:
        return lambda w: by_group([w.split(rows)[part] for part in parts], groups)

    rules = [Rule(f"{ours}{our}", (f"{theirs}{their}",)) for our, their in _SAME.items()]
    rules += [
        Rule(f"{ours}xz.weight", into, of_map(1, 0, groups=H)),
        Rule(f"{ours}bc.weight", into, of_map(2, 3, groups=G)),
        Rule(f"{ours}dt.weight", into, of_map(4, groups=H)),
    ]
    for kind in ("weight", "bias"):
        of = (f"{theirs}conv1d.{kind}",)
        rules += [
            Rule(f"{ours}conv.{kind}", of, lambda w: _alone(w).split(channels)[0]),
            Rule(f"{ours}conv_bc.{kind}", of, lambda w: by_group(_alone(w).split(channels)[1:], G)),
        ]
    return rules


def _alone(rows: Tensor) -> Tensor:
    """Without the one input of each channel; a bias has none."""
    return rows if rows.ndim == 1 else rows.squeeze(1)


def mamba_back(sizes: MambaSizes, ours: str, theirs: str) -> list[Rule]:
    """From ours to theirs."""
    H, P, G, N, _ = sizes

    def one_map(xz: Tensor, bc: Tensor, dt: Tensor) -> Tensor:
        x, z = from_groups(xz, H, (P, P))
        return torch.cat([z, x, *from_groups(bc, G, (N, N)), dt])

    def one_convolution(x: Tensor, bc: Tensor) -> Tensor:
        found = torch.cat([x, *from_groups(bc, G, (N, N))])
        return found if found.ndim == 1 else found[:, None]

    rules = [Rule(f"{theirs}{their}", (f"{ours}{our}",)) for our, their in _SAME.items()]
    maps = tuple(f"{ours}{name}.weight" for name in ("xz", "bc", "dt"))
    rules.append(Rule(f"{theirs}in_proj.weight", maps, one_map))
    for kind in ("weight", "bias"):
        convolutions = (f"{ours}conv.{kind}", f"{ours}conv_bc.{kind}")
        rules.append(Rule(f"{theirs}conv1d.{kind}", convolutions, one_convolution))
    return rules
