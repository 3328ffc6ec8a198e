"""A transformers MoE block as a `dMoE`, and back: the config, and every tensor by rename.

`mb_layers.transformers.block_routing` knows how each class of block routes. Widths are taken from
the weights, the names of tensors from the state dict.

Letters: D hidden, F expert ffn width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mb_layers.config import MoEConfig
from mb_layers.moe import dMoE
from mb_layers.state_dicts import Rule, put_in, tells_what_trains, translate, translate_back
from mb_layers.tensors import is_dtensor
from mb_layers.transformers.block_routing import BLOCKS
from mb_layers.transformers.experts import (
    IMPLEMENTATION,
    activation_name,
    fused_activation,
    gate_of_gpt_oss,
    glu_name,
    has_own_gate,
    recognise_gate,
    refuse_few_bits,
    refuse_offloaded,
)


def moe_from_block(block: nn.Module, **overrides: Any) -> dMoE:
    """Return a `dMoE` with the weights, dtype, device and `requires_grad` of a transformers block.

    Weights that lie alike in both are not copied: what trains the layer then changes the block, but
    for weights that lie otherwise there. To go on with both, give a `copy.deepcopy` of the block.

    Args:
        block: a block of a class in `BLOCKS`.
        overrides: fields of `MoEConfig` to set otherwise than the block has them.

    transformers' balancing loss is K when balanced, ours 1, so `load_balancing_loss_weight` is K
    times their `router_aux_loss_coef`.

    Raises:
        ValueError: another kind of block, a block that computes what `dMoE` cannot, overrides of
            sizes, or weights that do not all find their place, or are frozen in part.
    """
    with tells_what_trains():
        layer = dMoE(config_from_block(block, **overrides), device="meta")
        tensors = {name: block.get_parameter(name) for name, _ in block.named_parameters()}
        whole = {**block.state_dict(), **tensors}
        _refuse_half_frozen(tensors, block_rules(whole, layer.config))
        state = translate_block(whole, layer.config)
        _check_shapes(state, layer, overrides)
        put_in(layer, state)
    return layer.train(block.training)


def _refuse_half_frozen(parameters: Mapping[str, Tensor], rules: Sequence[Rule]) -> None:
    """Raise where some of the tensors that make up one of ours are frozen, and some not."""
    for rule in rules:
        trains = {n: parameters[n].requires_grad for n in rule.sources if n in parameters}
        if len(set(trains.values())) > 1:
            raise ValueError(
                f"expected {' and '.join(trains)} to be frozen or trained together, as a dMoE has "
                f"one weight for them, got {' and '.join(n for n, t in trains.items() if not t)} "
                "frozen; freeze all of them or none"
            )


def _check_shapes(
    state: Mapping[str, Tensor], layer: nn.Module, overrides: Collection[str]
) -> None:
    """Raise where a block's weights are not of the sizes that the layer's config has."""
    for name, tensor in layer.state_dict().items():
        got = state[name].shape
        if got != tensor.shape:
            hint = f"leave out what changes sizes among the overrides {', '.join(overrides)}"
            raise ValueError(
                f"expected {name} of shape {tuple(tensor.shape)} by the config, got {tuple(got)} "
                f"of the block; {hint if overrides else 'give it the sizes of its experts'}"
            )


def config_from_block(block: nn.Module, **overrides: Any) -> MoEConfig:
    """Return the `MoEConfig` of a transformers MoE block.

    Arguments and errors are `moe_from_block`'s.
    """
    kind = type(block).__name__
    if kind not in BLOCKS:
        raise ValueError(
            f"expected a block of {', '.join(BLOCKS)}, got {kind}; mb_layers.transformers."
            "use(model) runs the experts of others on the kernels, in their own blocks"
        )
    refuse_offloaded(kind, block)
    refuse_few_bits(kind, block)
    experts: Any = block.experts
    router: Any = next(m for m in map(block._modules.get, ("gate", "router")) if m is not None)
    for part, attribute in ((experts, "is_transposed"), (router, "top_k")):
        if not hasattr(part, attribute):
            raise ValueError(
                f"expected {kind} with experts and a router of transformers, got "
                f"{type(part).__name__}; merge or unload adapters first"
            )
    config = experts.config
    routing = BLOCKS[kind](_Numbers(router, config))
    top_k = router.top_k
    num_experts, hidden, ffn = experts.down_proj.shape
    if experts.is_transposed:
        hidden, ffn = ffn, hidden
    into: Any = block._modules.get(LATENT_MAPS["latent_down"])
    if isinstance(into, nn.Linear):  # else the experts take the hidden state
        hidden, latent = into.in_features, hidden
    else:
        latent = None
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "latent_size": latent,
        "ffn_hidden_size": ffn,
        "num_experts": num_experts,
        "top_k": top_k,
        "activation": _gate_of(experts),
        "load_balancing_loss_weight": top_k * (getattr(config, "router_aux_loss_coef", None) or 0),
        "init_method_std": config.initializer_range,
    }
    shared: Any = next((m for m in map(block._modules.get, SHARED_EXPERTS) if m is not None), None)
    if shared is not None:
        width = shared.down_proj.in_features
        if not width:
            raise ValueError(
                f"expected {kind} with a shared expert of some width, got one of 0, whose empty "
                f'weights dMoE does not have; model.set_experts_implementation("{IMPLEMENTATION}") '
                "works"
            )
        gate = fields["activation"].partition("(")[0]
        named = glu_name if experts.has_gate else activation_name
        if hasattr(shared, "act_fn") and named(shared.act_fn) != gate:
            raise ValueError(
                f"expected {kind} with one gate for all its experts, got {gate} and, of the shared "
                f'one, {named(shared.act_fn)}; model.set_experts_implementation("'
                f'{IMPLEMENTATION}") works'
            )
        fields["shared_expert_hidden_size"] = width
        fields["shared_expert_gate"] = hasattr(block, "shared_expert_gate")
    return MoEConfig(**(fields | routing | overrides))


class _Numbers:
    """A config, but for the numbers that the router keeps: it computes with those.

    They differ where the config or the router was changed after the model was built, and where the
    config has a list, of one number per layer.
    """

    def __init__(self, router: nn.Module, config: Any) -> None:
        self._router, self._config = router, config

    def __getattr__(self, name: str) -> Any:
        kept = vars(self._router)
        return kept[name] if name in kept else getattr(self._config, name)


def _gate_of(experts: Any) -> str:
    if not experts.has_gate:
        name = activation_name(experts.act_fn)
        if name is None:
            raise ValueError(
                f"expected an activation that dMoE computes, got {experts.act_fn!r}; "
                f'model.set_experts_implementation("{IMPLEMENTATION}") works'
            )
        return name
    if hasattr(experts, "alpha"):  # GPT-OSS; its config has the numbers in some releases only
        return gate_of_gpt_oss(experts.alpha, experts.limit)
    if not has_own_gate(experts):
        return glu_name(experts.act_fn)
    recognise_gate(experts)
    name = fused_activation(experts)
    if name is None:
        raise ValueError(
            f"expected a gate that dMoE computes, got that of {type(experts).__name__}; "
            f'model.set_experts_implementation("{IMPLEMENTATION}") works'
        )
    return name


def translate_block(state: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """Rename a block's state dict to that of `dMoE(config)`, every tensor used exactly once.

    Takes stacked experts, as in memory (`experts.gate_up_proj`), and one tensor per expert, as in
    the files on the Hub (`experts.0.gate_proj.weight`, Mixtral: `experts.0.w1.weight`).
    """
    return translate(state, block_rules(state, config), _names(config))


def translate_layer(
    state: Mapping[str, Tensor], config: MoEConfig, names: Collection[str]
) -> dict[str, Tensor]:
    """The way back: rename the state dict of `dMoE(config)` to a block's, of these `names`.

    The result's tensors are views of `state`'s where the layout allows. `names` may be those of a
    block in memory or of the files on the Hub.
    """
    return translate_back(state, block_rules(names, config), names)


def _names(config: MoEConfig) -> Collection[str]:
    return dMoE(config, device="meta").state_dict().keys()


# Names that differ between blocks for the same part.
_ROUTERS = ("gate.weight", "router.weight", "router.gate.weight", "gate.wg.weight")
_FLAT_BIASES = ("gate.e_score_correction_bias", "e_score_correction_bias", "expert_bias")
_BIAS_OF_ROWS = "gate.moe_statics.e_score_correction_bias"  # [1, E]
SHARED_EXPERTS = ("shared_expert", "shared_experts", "shared_mlp")
LATENT_MAPS = {"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"}


def block_rules(names: Collection[str], config: MoEConfig) -> list[Rule]:
    """How tensors of a block's `names` make up a layer's."""

    def called(candidates: Sequence[str], suffix: str = "") -> str:
        return next((c for c in candidates if c + suffix in names), candidates[0])

    rules = [Rule("router.weight", (called(_ROUTERS),))]
    if config.balancing_bias and _BIAS_OF_ROWS in names:
        rules.append(
            Rule(
                "router.balancing_bias",
                (_BIAS_OF_ROWS,),
                lambda bias: bias.float().flatten(),
                lambda bias: (bias[None],),
            )
        )
    elif config.balancing_bias:
        name = called(_FLAT_BIASES)
        rules.append(Rule("router.balancing_bias", (name,), Tensor.float, lambda bias: (bias,)))
    if "experts.gate_up_proj_bias" in names:  # GPT-OSS's
        rules += _TRANSPOSED_WITH_BIASES
    elif (stacked := f"experts.{'gate_up' if config.is_glu else 'up'}_proj") in names:
        rules.append(Rule("experts.w1", (stacked,)))
        rules.append(Rule("experts.w2", ("experts.down_proj",)))
    else:
        projections = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = ("w1", "w3", "w2") if "experts.0.w1.weight" in names else projections
        experts, ups = range(config.num_experts), (gate, up) if config.is_glu else (up,)
        w1 = tuple(f"experts.{e}.{name}.weight" for e in experts for name in ups)
        w2 = tuple(f"experts.{e}.{down}.weight" for e in experts)
        rules.append(Rule("experts.w1", w1, *_w1_of(config)))
        rules.append(Rule("experts.w2", w2, _stack, _unstack))
    if config.shared_expert_hidden_size is not None:
        shared = called(SHARED_EXPERTS, ".down_proj.weight")
        ups = ("gate_proj", "up_proj") if config.is_glu else ("up_proj",)
        maps = tuple(f"{shared}.{name}.weight" for name in ups)
        if (fused := f"{shared}.gate_up_proj.weight") in names:  # MiniMax-M3's
            rules.append(Rule("shared_expert.w1", (fused,), _stack, _unstack))
        else:
            joined = (_stack_pairs, _halves) if config.is_glu else (_stack, _unstack)
            rules.append(Rule("shared_expert.w1", maps, *joined))
        down = (f"{shared}.down_proj.weight",)
        rules.append(Rule("shared_expert.w2", down, _stack, _unstack))
    if config.shared_expert_gate:
        rules.append(Rule("shared_expert.gate", ("shared_expert_gate.weight",)))
    if config.latent_size is not None:
        rules += [
            Rule(f"{ours}.weight", (f"{theirs}.weight",)) for ours, theirs in LATENT_MAPS.items()
        ]
    return rules


def _w1_of(config: MoEConfig) -> tuple[Callable[..., Tensor], Callable[[Tensor], Sequence[Tensor]]]:
    """How each expert's matrices become w1, and the way back: a gate's lies over the other."""
    return (_stack_pairs, _split_pairs) if config.is_glu else (_stack, _unstack)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _stack_pairs(*tensors: Tensor) -> Tensor:
    """Gate and up projections, alternating, to [E, 2F, D]."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def _split_pairs(stacked: Tensor) -> Sequence[Tensor]:
    return [half for expert in _unstack(stacked) for half in expert.chunk(2)]


def _halves(stacked: Tensor) -> Sequence[Tensor]:
    """The two matrices of one expert, as tensors of their own: safetensors saves no model of parts.

    Accelerate's save_state does so.
    """
    return [half.clone() for half in _split_pairs(stacked)]


def _unstack(stacked: Tensor) -> Sequence[Tensor]:
    """The matrices of a stack. Of one that FSDP2 shards, each rank gets all of it."""
    if is_dtensor(stacked):  # which cannot be taken apart where it is sharded
        from torch.distributed.tensor import Replicate

        stacked = stacked.redistribute(placements=[Replicate()] * stacked.device_mesh.ndim)
    return stacked.unbind()


def _gates_then_ups(alternating: Tensor) -> Tensor:
    return torch.cat([alternating[..., ::2], alternating[..., 1::2]], dim=-1)


def _alternating(halves: Tensor) -> Tensor:
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)


_TRANSPOSED_WITH_BIASES = [
    Rule("router.bias", ("router.bias",)),
    Rule(
        "experts.w1",
        ("experts.gate_up_proj",),  # [E, D, 2F], gates and ups alternating
        lambda w: _gates_then_ups(w).mT.contiguous(),
        lambda w1: (_alternating(w1.mT),),
    ),
    Rule(
        "experts.b1",
        ("experts.gate_up_proj_bias",),
        _gates_then_ups,
        lambda b1: (_alternating(b1),),
    ),
    Rule(
        "experts.w2",
        ("experts.down_proj",),  # [E, F, D]
        lambda w: w.mT.contiguous(),
        lambda w2: (w2.mT.contiguous(),),
    ),
    Rule("experts.b2", ("experts.down_proj_bias",)),
]
