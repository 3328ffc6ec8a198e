"""Tensors of experts behind SwiGLU, as Llama's relatives hold them: from theirs to ours, both ways.

Files of the hub have a matrix for each expert. All experts in one tensor is what transformers 5
computes with, and writes if asked for (`save_original_format` False) or for models that it holds on
a disk.

Letters: D hidden, E experts, F their width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from mb_layers import MoEConfig
from mb_layers.state_dicts import Rule


@dataclass(frozen=True)
class ExpertNames:
    """Where an architecture keeps its experts: names within a layer.

    Attributes:
        gate, up, down: of one expert, by its number; None: all of them are in one tensor.
        shared: of the expert that every token visits.
        bias: what is added to the scores for the choice of experts.
        bias_rows: it is [1, E].
        today: names that differ where the experts of a layer are in one tensor.
    """

    router: str = "mlp.gate"
    gate: str | None = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"
    bias: str = "mlp.gate.e_score_correction_bias"
    bias_rows: bool = False
    today: Mapping[str, str] = field(default_factory=dict)

    def stacked(self) -> ExpertNames:
        """The same where the experts of a layer are in one tensor."""
        return replace(self, gate=None, **{"router": LLAMA.router, **self.today})


LLAMA = ExpertNames()
MIXTRAL = ExpertNames(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
PHIMOE = replace(MIXTRAL, today={"router": "mlp.router"})
DEEPSEEK = ExpertNames(shared="mlp.shared_experts")  # as one, however many they are
MINIMAX = replace(
    MIXTRAL,
    bias="block_sparse_moe.e_score_correction_bias",
    today={"bias": "mlp.e_score_correction_bias"},
)
MINIMAX_M3 = replace(
    MINIMAX,
    shared="block_sparse_moe.shared_experts",
    today={"bias": "mlp.gate.e_score_correction_bias", "shared": DEEPSEEK.shared},
)
ERNIE = replace(
    DEEPSEEK,
    bias="mlp.moe_statics.e_score_correction_bias",
    bias_rows=True,
    today={"bias": "mlp.gate.moe_statics.e_score_correction_bias"},
)
HUNYUAN = ExpertNames(
    "mlp.router.gate",
    shared="mlp.shared_mlp",
    bias="mlp.expert_bias",
    today={"bias": "mlp.e_score_correction_bias", "shared": DEEPSEEK.shared},
)

LFM2 = ExpertNames(  # of its feed_forward
    gate="mlp.experts.{}.w1", up="mlp.experts.{}.w3", down="mlp.experts.{}.w2",
    bias="mlp.expert_bias",
)  # fmt: skip
HUNYUAN_V1 = ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp", today={"router": "mlp.gate.wg"})
EXAONE = replace(DEEPSEEK, bias="mlp.e_score_correction_bias", today={"bias": LLAMA.bias})
AFMOE = replace(
    DEEPSEEK, router="mlp.router.gate", bias="mlp.expert_bias", today={"router": "mlp.router.gate"}
)


# Those of a layer's experts and router, whose names begin with the two words: ours, and theirs.
ExpertRules: TypeAlias = Callable[[MoEConfig, str, str], list[Rule]]


def expert_rules(names: ExpertNames, moe: MoEConfig, ours: str, theirs: str) -> list[Rule]:
    """Rules of a layer with experts by these names, see `ExpertRules`."""
    rules = [Rule(f"{ours}mlp.router.weight", (f"{theirs}{names.router}.weight",))]
    if moe.balancing_bias:
        rule = Rule(f"{ours}mlp.router.balancing_bias", (f"{theirs}{names.bias}",))
        if names.bias_rows:
            rule = rule._replace(build=lambda b_1E: b_1E.squeeze(0), split=lambda b_E: (b_E[None],))
        rules.append(rule)
    if names.gate is None:
        rules += [
            Rule(f"{ours}mlp.experts.{our}", (f"{theirs}mlp.experts.{their}",))
            for our, their in (("w1", "gate_up_proj"), ("w2", "down_proj"))
        ]
    else:
        parts = (names.gate, names.up, names.down)
        experts = [
            tuple(f"{theirs}{part.format(expert)}.weight" for part in parts)
            for expert in range(moe.num_experts)
        ]
        rules += _stack_rules(f"{ours}mlp.experts", experts)
    if moe.shared_expert_hidden_size is not None:
        shared = f"{theirs}{names.shared}"
        maps = tuple(f"{shared}.{part}_proj.weight" for part in ("gate", "up", "down"))
        rules += _stack_rules(f"{ours}mlp.shared_expert", [maps])
    if moe.shared_expert_gate:
        gate = f"{theirs}{names.shared}_gate.weight"
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
