"""Hugging Face transformers on our kernels. Needs `pip install mb-layers[transformers]`.

Importing this module registers the implementation "mb" in transformers' `ExpertsInterface`:

    import mb_layers.transformers
    model.set_experts_implementation("mb")

From then on the experts of any MoE model that transformers stacks run through `mb_kernels`, forward
and backward; routers, losses and checkpoints stay transformers' own. Experts of the common form
(gate over up, one activation, no bias) take the fused `expert_mlp`; others (GPT-OSS: biases,
clamped gate, transposed weights) the same kernels step by step.

To train with this library's router, losses and metrics instead, `moe_from_block` turns a block into
a `dMoE` with the same weights, and `swap_blocks` does so for a whole model.

Letters: T tokens, D hidden, F expert ffn width, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mb_kernels
import torch
from mb_kernels.activation import GLU_ACTIVATIONS
from torch import Tensor, nn

from mb_layers.config import MoEConfig
from mb_layers.experts import cast_alike, expert_mlp_in_steps, to_plain
from mb_layers.losses import attach_aux_loss
from mb_layers.moe import dMoE
from mb_layers.state_dicts import Rule, translate

try:
    from transformers import activations
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        "mb_layers.transformers needs transformers >= 5.17; install it with "
        "pip install 'mb-layers[transformers]'"
    ) from error

IMPLEMENTATION = "mb"

# Their activation, as a config names it, in our words. For GLU our name has the gate in it.
_PLAIN_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
_GLU_NAMES = {plain: glu for glu, plain in GLU_ACTIVATIONS.items()}


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of a transformers experts module, as `ExpertsInterface` calls it.

    Args:
        self: the experts module, with the attributes `use_experts_implementation` gives it.
        hidden_states: x_TD [T, D].
        top_k_index: expert ids [T, K]; id E (another rank's expert) adds nothing.
        top_k_weights: routing weights [T, K].
    """
    num_experts = self.num_experts
    name_of_w1 = "gate_up_proj" if self.has_gate else "up_proj"
    weights = [
        to_plain(getattr(self, name), num_experts)
        for name in (
            name_of_w1,
            "down_proj",
            *((f"{name_of_w1}_bias", "down_proj_bias") if self.has_bias else ()),
        )
    ]
    x_TD, w1, w2, *biases = cast_alike(hidden_states, *weights)
    bins = mb_kernels.bin_tokens(top_k_index, num_experts)
    weights_TK = top_k_weights.float()
    activation = _fused_activation(self)
    if activation is not None:
        y_TD = mb_kernels.expert_mlp(x_TD, w1, w2, bins, weights_TK, activation=activation)
    else:
        b1, b2 = biases or (None, None)
        y_TD = expert_mlp_in_steps(
            x_TD,
            w1,
            w2,
            bins,
            weights_TK,
            self._apply_gate if self.has_gate else self.act_fn,
            b1=b1,
            b2=b2,
            transpose_weight=not self.is_transposed,
            after=self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None,
        )
    return y_TD.to(hidden_states.dtype)


ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def _fused_activation(experts: Any) -> str | None:
    """Our name of the experts' activation if `expert_mlp` computes just what they do."""
    if experts.has_bias or experts.is_transposed or getattr(experts, "has_post_expert_norm", False):
        return None
    # A gate of the module's own (clamped, say) is not the one transformers gives by default.
    own_gate = type(experts)._apply_gate.__module__ != ExpertsInterface.__module__
    if experts.has_gate and (own_gate or not getattr(experts, "is_concatenated", True)):
        return None
    act_fn = experts.act_fn
    plain = next((ours for kind, ours in _ACTIVATIONS if _is_a(act_fn, kind)), None)
    return _GLU_NAMES.get(plain or "") if experts.has_gate else plain


def _is_a(act_fn: object, prototype: nn.Module) -> bool:
    """Same class and, where the class wraps one of several functions, the same function."""
    if type(act_fn) is not type(prototype):
        return False
    act, like = getattr(act_fn, "act", None), getattr(prototype, "act", None)
    return getattr(act, "__name__", str(act)) == getattr(like, "__name__", str(like))


_ACTIVATIONS = [(activations.ACT2FN[theirs], ours) for theirs, ours in _PLAIN_NAMES.items()]


def moe_from_block(block: nn.Module, **overrides: Any) -> dMoE:
    """Return a `dMoE` with the weights, dtype and device of a transformers MoE block.

    Args:
        block: a `MixtralSparseMoeBlock`, `OlmoeSparseMoeBlock`, `Qwen2MoeSparseMoeBlock`,
            `Qwen3MoeSparseMoeBlock` or `DeepseekV3MoE`.
        overrides: fields of `MoEConfig` to set otherwise than the block has them.

    transformers' balancing loss is K when balanced, ours 1, so `load_balancing_loss_weight` is K
    times their `router_aux_loss_coef`.

    Raises:
        ValueError: another kind of block, a block that computes what `dMoE` cannot, or weights
            that do not all find their place.
    """
    layer = dMoE(config_from_block(block, **overrides), device="meta")
    state = translate_block(block.state_dict(), layer.config)
    layer.load_state_dict(state, assign=True)
    layer.requires_grad_(True)
    return layer.train(block.training)


def config_from_block(block: nn.Module, **overrides: Any) -> MoEConfig:
    """Return the `MoEConfig` of a transformers MoE block; see `moe_from_block`."""
    kind = type(block).__name__
    if kind not in _BLOCKS:
        raise ValueError(
            f"expected a block of {', '.join(_BLOCKS)}, got {kind}; "
            f'model.set_experts_implementation("{IMPLEMENTATION}") works for any MoE model'
        )
    experts: Any = block.experts
    config = experts.config
    if config.hidden_act not in _PLAIN_NAMES:
        raise ValueError(
            f"expected hidden_act to be one of {', '.join(_PLAIN_NAMES)}, got {config.hidden_act!r}"
        )
    top_k = config.num_experts_per_tok
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_experts": experts.num_experts,
        "top_k": top_k,
        "activation": _GLU_NAMES[_PLAIN_NAMES[config.hidden_act]],
        "load_balancing_loss_weight": top_k * getattr(config, "router_aux_loss_coef", 0.0),
        "init_method_std": config.initializer_range,
    }
    return MoEConfig(**(fields | _BLOCKS[kind](config) | overrides))


def translate_block(state: Mapping[str, Tensor], config: MoEConfig) -> dict[str, Tensor]:
    """Rename a block's state dict to that of `dMoE(config)`, every tensor used exactly once.

    Takes stacked experts, as in memory (`experts.gate_up_proj`), and one tensor per expert, as in
    the files on the Hub (`experts.0.gate_proj.weight`, Mixtral: `experts.0.w1.weight`).
    """
    rules = [Rule("router.weight", ("gate.weight",))]
    if config.balancing_bias:
        rules.append(Rule("router.balancing_bias", ("gate.e_score_correction_bias",), Tensor.float))
    if "experts.gate_up_proj" in state:
        rules.append(Rule("experts.w1", ("experts.gate_up_proj",)))
        rules.append(Rule("experts.w2", ("experts.down_proj",)))
    else:
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = ("w1", "w3", "w2") if "experts.0.w1.weight" in state else names
        experts = range(config.num_experts)
        w1 = tuple(f"experts.{e}.{name}.weight" for e in experts for name in (gate, up))
        w2 = tuple(f"experts.{e}.{down}.weight" for e in experts)
        rules.append(Rule("experts.w1", w1, _stack_pairs))
        rules.append(Rule("experts.w2", w2, _stack))
    if config.shared_expert_hidden_size is not None:
        shared = "shared_expert" if "shared_expert.gate_proj.weight" in state else "shared_experts"
        pair = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
        rules.append(Rule("shared_expert.w1", pair, _stack_pairs))
        rules.append(Rule("shared_expert.w2", (f"{shared}.down_proj.weight",), _stack))
    if config.shared_expert_gate:
        rules.append(Rule("shared_expert.gate", ("shared_expert_gate.weight",)))
    return translate(state, rules, dMoE(config, device="meta").state_dict().keys())


class BlockAdapter(nn.Module):
    """A `dMoE` in the place of a transformers block: takes and returns hidden states alone.

    The auxiliary loss rides on the output (`attach_aux_loss`) with weight `aux_scale`.
    """

    def __init__(self, moe: dMoE, *, aux_scale: float) -> None:
        super().__init__()
        self.moe = moe
        self.aux_scale = aux_scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [B, S, D] to the same shape."""
        y, aux_loss, _ = self.moe(hidden_states)
        if self.training and torch.is_grad_enabled():
            y = attach_aux_loss(y, aux_loss, self.aux_scale)
        return y


def swap_blocks(model: nn.Module, **overrides: Any) -> dict[str, dMoE]:
    """Replace every MoE block that `moe_from_block` knows by a `BlockAdapter`, in place.

    The backward pass then adds the gradient of the mean auxiliary loss over the blocks, unscaled:
    under gradient accumulation or fp16 loss scaling set `adapter.aux_scale` accordingly.

    Args:
        model: a transformers model (or any module that holds such blocks).
        overrides: fields of `MoEConfig`, for every block.

    Returns:
        The new layers by the name of the block they replaced.

    Raises:
        ValueError: the model holds no such block, or computes a balancing loss of its own from
            router logits, which are no longer there.
    """
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "expected config.output_router_logits=False, got True: the swapped blocks bring their "
            "own balancing loss; set it to False"
        )
    blocks = {name: m for name, m in model.named_modules() if type(m).__name__ in _BLOCKS}
    if not blocks:
        raise ValueError(f"expected a model with blocks of {', '.join(_BLOCKS)}, found none")
    layers = {name: moe_from_block(block, **overrides) for name, block in blocks.items()}
    for name, layer in layers.items():
        adapter = BlockAdapter(layer, aux_scale=1 / len(layers)).train(layer.training)
        model.set_submodule(name, adapter)
    return layers


def _mixtral(config: Any) -> dict[str, Any]:
    if config.router_jitter_noise:
        raise ValueError(
            f"expected router_jitter_noise=0, got {config.router_jitter_noise}: Mixtral shows the "
            "experts the jittered tokens, dMoE only the router; set it to 0 and pass jitter_eps="
        )
    return {"ffn_hidden_size": config.intermediate_size, "renormalize": True}


def _olmoe(config: Any) -> dict[str, Any]:
    return {"ffn_hidden_size": config.intermediate_size, "renormalize": config.norm_topk_prob}


def _qwen3(config: Any) -> dict[str, Any]:
    return {"ffn_hidden_size": config.moe_intermediate_size, "renormalize": config.norm_topk_prob}


def _qwen2(config: Any) -> dict[str, Any]:
    shared = {
        "shared_expert_hidden_size": config.shared_expert_intermediate_size,
        "shared_expert_gate": True,
    }
    return _qwen3(config) | shared


def _deepseek_v3(config: Any) -> dict[str, Any]:
    groups = {}
    if config.n_group > 1:
        groups = {"num_expert_groups": config.n_group, "top_k_groups": config.topk_group}
    return groups | {
        "ffn_hidden_size": config.moe_intermediate_size,
        "score_function": "sigmoid",
        "renormalize": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
        "balancing_bias": True,
        "shared_expert_hidden_size": config.moe_intermediate_size * config.n_shared_experts,
    }


_BLOCKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "MixtralSparseMoeBlock": _mixtral,
    "OlmoeSparseMoeBlock": _olmoe,
    "Qwen2MoeSparseMoeBlock": _qwen2,
    "Qwen3MoeSparseMoeBlock": _qwen3,
    "DeepseekV3MoE": _deepseek_v3,
}


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _stack_pairs(*tensors: Tensor) -> Tensor:
    """Gate and up projections, alternating, to [E, 2F, D]."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])
