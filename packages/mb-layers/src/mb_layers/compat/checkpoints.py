"""MegaBlocks' checkpoints in our layout, and ours in theirs.

MegaBlocks keeps a dMoE's experts as w1, v1 and w2 of [E F, D], a MoE's as w1 [E, D, F] and w2
[E, F, D]. Under expert parallelism each rank writes the experts it holds: rank r of R has the
experts' slice r mod min(R, E), and where there are more ranks than experts, of those the features'
slice r div E.

Letters: E experts, D hidden, F expert ffn width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from mb_kernels.activation import parse
from torch import Tensor

from mb_layers.compat.arguments import Layer
from mb_layers.config import MoEConfig
from mb_layers.moe import MoE, dMoE
from mb_layers.state_dicts import Rule, translate, translate_back

# What ranks may differ by, relative to a tensor that all of them hold: kernels that add in no fixed
# order round otherwise on each.
_DRIFT = 0.05
# What decides a layer's output and has no field in MegaBlocks' Arguments.
_NOT_THEIRS = (
    "score_function",
    "routed_scaling_factor",
    "num_expert_groups",
    "balancing_bias",
    "num_zero_experts",
    "latent_size",
    "weights_on_input",
    "router_bias",
    "mlp_bias",
    "shared_expert_gate",
)
# The same of what a capacity drops.
_NOT_THEIRS_OF_CAPACITY = ("eval_capacity_factor", "min_capacity", "drop_policy")
_NO_SUCH = "MegaBlocks has no such layer, and would compute something else with these weights"


def from_megablocks(
    state: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    config: MoEConfig,
    *,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Translate a MegaBlocks state dict to the layout of `dMoE(config)` or `MoE(config)`.

    Takes the layouts of `dMoE` and of `MoE`, and the names of older versions (`mlp.w1` for
    `experts.mlp.w1`).

    Args:
        state: one state dict, or those of all ranks of an expert-parallel group in rank order.
        config: of the layer.
        prefix: of the layer's names in the state dict of a model, `blocks.0.ffn.` say; names
            without it are another layer's.

    Raises:
        ValueError: not every tensor of the source and of the target is used exactly once, tensors
            of other sizes, or ranks that are not those of one group.
    """
    states = [state] if isinstance(state, Mapping) else list(state)
    states = [
        {name.removeprefix(prefix): one[name] for name in one if name.startswith(prefix)}
        for one in states
    ]
    target = _target(config)
    try:
        merged = states[0] if len(states) == 1 else _merge_ranks(states, config)
        translated = translate(merged, rules(merged.keys(), config), target.keys())
    except (RuntimeError, IndexError) as error:  # of tensors that cannot be split or joined so
        raise ValueError(
            f"expected the tensors of {config.num_experts} experts with hidden_size="
            f"{config.hidden_size}, got others: {error}"
        ) from error
    for name, tensor in translated.items():
        if tensor.shape != target[name].shape:
            raise ValueError(
                f"expected {name} of shape {tuple(target[name].shape)}, got {tuple(tensor.shape)}; "
                "the checkpoint has other sizes, or holds one rank's experts alone"
            )
    return translated


def to_megablocks(
    state: Mapping[str, Tensor],
    config: MoEConfig,
    *,
    prefix: str = "",
    layer: Layer | None = None,
) -> dict[str, Tensor]:
    """Translate the state dict of `dMoE(config)` or `MoE(config)` to MegaBlocks' names and layout.

    Args:
        state: the state dict.
        config: of the layer.
        prefix: put before the names.
        layer: the MegaBlocks class to load the result. None: "MoE" if the config has a capacity
            factor. MegaBlocks' MoE with moe_capacity_factor=0 is a dMoE here: say "MoE" for it.

    Raises:
        ValueError: the layer has parameters that MegaBlocks' has not, or computes with those it has
            what MegaBlocks does not.
    """
    if layer is None:
        layer = "dMoE" if config.capacity_factor is None else "MoE"
    _check_theirs(config, layer)
    names = their_names(config)
    back = translate_back(state, rules(names, config, layer=layer), names)
    return {prefix + name: back[name].contiguous() for name in names}


def _check_theirs(config: MoEConfig, layer: str) -> None:
    """Refuse a layer whose weights MegaBlocks would load and compute something else with."""
    if layer not in ("dMoE", "MoE"):
        raise ValueError(f"expected layer to be 'dMoE' or 'MoE', got {layer!r}")
    if layer == "MoE" and config.is_glu:
        raise ValueError(
            f"expected an activation without a gate for MegaBlocks' MoE, got {config.activation!r}:"
            " pass layer='dMoE', which has gates and drops no token"
        )
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    drops = layer == "MoE" and config.capacity_factor is not None
    for name in (*_NOT_THEIRS, *(_NOT_THEIRS_OF_CAPACITY if drops else ())):
        if (value := getattr(config, name)) != defaults[name]:
            raise ValueError(f"expected {name}={defaults[name]!r}, got {value!r}: {_NO_SUCH}")
    activation = parse(config.activation)
    if min(activation.limit, activation.up_cap) < math.inf or activation.offset:
        raise ValueError(
            f"expected an activation of the gate alone, got {config.activation!r}: {_NO_SUCH}"
        )


def _target(config: MoEConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return (dMoE if config.capacity_factor is None else MoE)(config).state_dict()


def their_names(config: MoEConfig) -> list[str]:
    """The names of MegaBlocks' parameters, in its order: an optimizer's state goes by that."""
    names = ["router.layer.weight"]
    if config.output_bias:
        names.append("experts.bias")
    names += ["experts.mlp.w1", "experts.mlp.w2"]
    if config.is_glu:
        names.append("experts.mlp.v1")
    if config.shared_expert_hidden_size is not None:
        linears = (
            ("up_proj", "down_proj", "gate_proj") if config.is_glu else ("up_proj", "down_proj")
        )
        suffixes = ("weight", "bias") if config.shared_expert_bias else ("weight",)
        names += [f"shared_expert.{linear}.{s}" for linear in linears for s in suffixes]
    return names


def rules(names: Collection[str], config: MoEConfig, *, layer: Layer = "dMoE") -> list[Rule]:
    """How tensors of MegaBlocks' `names` make up a layer's, and back in the layout of `layer`."""

    def by_expert(w: Tensor) -> Tensor:  # from [E F, D] too
        return w.unflatten(0, (config.num_experts, -1)) if w.dim() == 2 else w

    def w1(*parts: Tensor) -> Tensor:  # from [E F, D] or from [E, D, F]
        by_row = [by_expert(p) if p.dim() == 2 else p.transpose(1, 2) for p in parts]
        return torch.cat(by_row, dim=1)

    def split_w1(w: Tensor) -> Sequence[Tensor]:
        parts = w.chunk(2 if config.is_glu else 1, dim=1)
        return [p.transpose(1, 2) if layer == "MoE" else p.flatten(0, 1) for p in parts]

    def w2(w: Tensor) -> Tensor:  # from [E F, D] or from [E, F, D]
        return by_expert(w).transpose(1, 2).contiguous()

    def split_w2(w: Tensor) -> Sequence[Tensor]:
        return [w.transpose(1, 2) if layer == "MoE" else w.transpose(1, 2).flatten(0, 1)]

    mlp = "experts.mlp" if "experts.mlp.w1" in names else "mlp"
    gated = ("v1",) if config.is_glu else ()
    found = [
        Rule("router.weight", ("router.layer.weight",)),
        Rule("experts.w1", tuple(f"{mlp}.{name}" for name in ("w1", *gated)), w1, split_w1),
        Rule("experts.w2", (f"{mlp}.w2",), w2, split_w2),
    ]
    if config.output_bias:
        bias = "experts.bias" if "experts.bias" in names else "bias"
        found.append(Rule("bias", (bias,), lambda b: b.view(b.shape[-1]), lambda b: [b]))
    if config.shared_expert_hidden_size is not None:
        up = ("gate_proj", "up_proj") if config.is_glu else ("up_proj",)
        for ours, theirs, suffix in (
            ("w1", up, "weight"),
            ("w2", ("down_proj",), "weight"),
            ("b1", up, "bias"),
            ("b2", ("down_proj",), "bias"),
        ):
            if suffix == "weight" or config.shared_expert_bias:
                linears = tuple(f"shared_expert.{name}.{suffix}" for name in theirs)
                parts = len(theirs)
                found.append(
                    Rule(
                        f"shared_expert.{ours}",
                        linears,
                        lambda *tensors: torch.cat(tensors)[None],
                        lambda t, n=parts: t[0].chunk(n),
                    )
                )
    return found


def _merge_ranks(states: Sequence[Mapping[str, Tensor]], config: MoEConfig) -> dict[str, Tensor]:
    """The state dict of one rank that holds all experts."""
    ranks, experts = len(states), config.num_experts
    expert_shards = min(ranks, experts)
    if not ranks or ranks % expert_shards or experts % expert_shards:
        raise ValueError(
            f"expected the state dicts of a number of ranks that divides {experts} experts or is a "
            f"multiple of them, got {ranks}"
        )
    for rank, state in enumerate(states):
        if different := state.keys() ^ states[0].keys():
            raise ValueError(
                f"expected the same names from every rank, got {', '.join(sorted(different))} from "
                f"one of ranks 0 and {rank} alone"
            )
    merged = dict(states[0])
    for name in states[0]:
        last = name.rpartition(".")[2]
        shards = [state[name] for state in states]
        if "mlp." not in name or last not in ("w1", "v1", "w2"):
            _check_alike(name, shards)
            continue
        if shards[0].dim() == 2:  # dMoE: [E F, D]
            shards = [s.unflatten(0, (experts // expert_shards, -1)) for s in shards]
        features = 2 if states[0][name].dim() == 3 and last == "w1" else 1
        columns = [
            torch.cat(shards[start : start + expert_shards])  # all experts, some features
            for start in range(0, ranks, expert_shards)
        ]
        whole = torch.cat(columns, dim=features)
        merged[name] = whole.flatten(0, 1) if states[0][name].dim() == 2 else whole
    return merged


def _check_alike(name: str, copies: Sequence[Tensor]) -> None:
    """Every rank has all of the router, the bias and the shared expert; rank 0's are used."""
    first = copies[0].float()
    for rank, copy in enumerate(copies):
        if copy.shape != first.shape or (copy.float() - first).norm() > _DRIFT * first.norm():
            raise ValueError(
                f"expected {name} to be the same on every rank, got another on rank {rank} than on "
                "rank 0: give the state dicts of one save of one layer"
            )
