"""`use(model)` runs the experts of a transformers model on our kernels.

Most classes of experts in transformers have a hook for other implementations, and ours is selected
by it. A few older models have stacked experts without this hook; there the class of the module is
replaced by a subclass with our forward. Parameters, names and checkpoints stay as they are.

Letters: T tokens, D hidden, F expert ffn width, E experts, K top-k.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import mb_kernels
import torch
from torch import Tensor, nn

from mb_layers.arguments import a_module
from mb_layers.factored import Factored, flatten, map_weight, unflatten, weight_of
from mb_layers.moe import MoELayer
from mb_layers.steps import expert_mlp_in_steps
from mb_layers.tensors import at_least_fp32, cast_alike, to_plain
from mb_layers.transformers.experts import (
    IMPLEMENTATION,
    glu_name,
    recognise_gate,
    refuse_few_bits,
    refuse_offloaded,
)


def use(model: nn.Module) -> list[str]:
    """Run the experts of a transformers model on `mb_kernels`, forward and backward.

    Returns:
        The names of the expert modules that now run on the kernels.

    Raises:
        ValueError: the model has no experts that can do so, or some of them have fewer bits than
            16, or are offloaded and of a class without the hook. The model is left as it was.
    """
    a_module(model=model)
    hooked = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    }
    others = {name: m for name, m in model.named_modules() if _theirs(type(m)) in _FORWARDS}
    moved = {**hooked, **others}
    if not moved:
        if any(isinstance(module, MoELayer) for module in model.modules()):
            raise ValueError(
                "expected a model with transformers' own experts, got one whose blocks are dMoE "
                "layers, which run on these kernels already"
            )
        kinds = sorted({type(m).__name__ for m in model.modules() if _looks_like_experts(m)})
        raise ValueError(
            "expected a model whose experts have an experts_implementation in transformers, found "
            "none" + (f"; {', '.join(kinds)} have no such hook" if kinds else "")
        )
    for name, module in moved.items():
        refuse_few_bits(name, module)
    for name, module in others.items():
        refuse_offloaded(name, module)
    for module in hooked.values():
        module.config._experts_implementation = IMPLEMENTATION
        recognise_gate(module)
    for module in others.values():
        if any(map(_is_ours, type(module).__mro__)):
            continue
        module.__class__ = _moved(type(module))
        if "_old_forward" in vars(module):  # what a hook of accelerate's calls, for a device_map
            module._old_forward = MethodType(type(module).forward, module)
    modules = model.named_modules()
    return [name for name, m in modules if name in moved and _theirs(type(m)) not in _BLOCKS]


def _theirs(kind: type) -> str:
    """The name of the class whose forward its modules run, or ran before they were moved.

    `fully_shard` makes the class of a module a subclass without a forward of its own.
    """
    forwards = (k for k in kind.__mro__ if "forward" in vars(k) and not _is_ours(k))
    return next(forwards).__name__


def _is_ours(kind: type) -> bool:
    return vars(kind).get("forward") in _FORWARDS.values()


@functools.cache
def _moved(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `kind` with our forward."""
    own = {"forward": _FORWARDS[_theirs(kind)], "__reduce_ex__": _reduce}
    return type(f"Mb{kind.__name__}", (kind,), own)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Pickle and copy by transformers' class, because our subclass is in no module."""
    return _remade, (type(self).__base__,), self.__dict__


def _remade(kind: type[nn.Module]) -> nn.Module:
    made = _moved(kind)
    return made.__new__(made)


def _looks_like_experts(module: nn.Module) -> bool:
    return "expert" in type(module).__name__.lower()


def _experts(
    x_TD: Tensor,
    w1: Tensor | Factored,
    w2: Tensor | Factored,
    ids_TK: Tensor,
    weights_TK: Tensor,
    act_fn: Any,
    *,
    num_experts: int,
    is_transposed: bool = False,
) -> Tensor:
    """Gated experts, w1 [E, 2F, D] and w2 [E, D, F]; ids of E and above add nothing."""
    activation = glu_name(act_fn)
    (x_TD,) = cast_alike(x_TD)
    w1, w2 = (map_weight(w, lambda part: part.to(x_TD.dtype)) for w in (w1, w2))
    ids_TK = torch.where(ids_TK < num_experts, ids_TK, -1)
    bins = mb_kernels.bin_tokens(ids_TK, num_experts)
    weights_TK = at_least_fp32(weights_TK)
    if isinstance(w1, Tensor) and isinstance(w2, Tensor):
        if is_transposed:
            w1, w2 = w1.mT, w2.mT
        return mb_kernels.expert_mlp(x_TD, w1, w2, bins, weights_TK, activation=activation)

    def gate(h_NM: Tensor) -> Tensor:
        gate_NF, up_NF = h_NM.chunk(2, dim=-1)
        return act_fn(gate_NF) * up_NF

    return expert_mlp_in_steps(
        x_TD, w1, w2, bins, weights_TK, gate, transpose_weight=not is_transposed
    )


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama-4's block: routing weights scale the experts' inputs.

    It calls the experts and leaves their weights to them, for PEFT may have wrapped them.
    """
    x_TD = hidden_states.reshape(-1, self.hidden_dim)
    scores_TE, logits_TE = self.router(x_TD)
    ids_TK = logits_TE.topk(self.top_k, dim=1).indices
    weights_TK1 = scores_TE.gather(1, ids_TK)[..., None]
    rows_ND = (x_TD[:, None] * weights_TK1).flatten(0, 1)
    y_ND = self.experts(rows_ND, ids_TK.reshape(-1, 1))
    routed_TD = y_ND.unflatten(0, (-1, self.top_k)).sum(dim=1)
    return self.shared_expert(x_TD) + routed_TD.to(x_TD.dtype), logits_TE


def _llama4_experts(self: Any, rows_ND: Tensor, ids_N1: Tensor) -> Tensor:
    """Llama-4's experts, called by its block with a row for each of a token's experts."""
    num_experts = self.num_experts
    w1, w2 = (
        map_weight(weight_of(self, name), lambda part: to_plain(part, num_experts))
        for name in ("gate_up_proj", "down_proj")
    )
    ones_N1 = torch.ones_like(ids_N1, dtype=torch.float32)
    return _experts(
        *(rows_ND, w1, w2, ids_N1, ones_N1, self.act_fn),
        num_experts=num_experts,
        is_transposed=True,
    )


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """DBRX: MegaBlocks' layout, w1, v1, w2 [E F, D]."""
    mlp, shape = self.mlp, (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1 = torch.cat([mlp.w1.view(shape), mlp.v1.view(shape)], dim=1)
    w2 = mlp.w2.view(shape).mT
    x_TD = hidden_states.reshape(-1, self.hidden_size)
    y_TD = _experts(
        *(x_TD, w1, w2, top_k_index, top_k_weights, mlp.activation_fn),
        num_experts=self.num_experts,
    )
    return y_TD.to(hidden_states.dtype).view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """LongCat: ids beyond the real experts are of zero experts, which return their token."""
    num_experts = self.num_routed_experts
    weights_TK = at_least_fp32(top_k_weights)
    zero_T1 = torch.where(top_k_index < num_experts, 0, weights_TK).sum(dim=1, keepdim=True)
    y_TD = hidden_states * zero_T1
    if num_experts:
        form, tensors = flatten(weight_of(self, "gate_up_proj"))
        w1 = unflatten(form, [tensor[:num_experts] for tensor in tensors])
        y_TD = y_TD + _experts(
            *(hidden_states, w1, weight_of(self, "down_proj"), top_k_index, weights_TK),
            self.act_fn,
            num_experts=num_experts,
        )
    return y_TD.to(hidden_states.dtype)


_BLOCKS: dict[str, Any] = {"Llama4TextMoe": _llama4}  # calls its experts in our way
_FORWARDS: dict[str, Any] = _BLOCKS | {
    "Llama4TextExperts": _llama4_experts,
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat,
}
