"""transformers' stacked experts through `mb_kernels`: the implementation "mb".

Experts run as one fused op, `expert_mlp`, with their weights in either memory order. Three kinds
run the same kernels step by step instead: experts whose gate is not recognised, with a norm after
each expert, or with adapters.

A class of experts may have its own gate (with a limit, say). `recognise_gate` looks for the name in
`mb_kernels.activation` that computes the same, and tests it on sample values; `use` calls it for
every module.

Letters: T tokens, D hidden, F expert ffn width, E experts, K top-k.
"""

from __future__ import annotations

import math
from typing import Any

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels.activation import GLU_ACTIVATIONS, activate_gated, parse
from torch import Tensor, nn

from mb_layers.factored import map_weight, weight_of
from mb_layers.steps import expert_mlp_in_steps
from mb_layers.tensors import at_least_fp32, cast_alike, to_plain

try:
    from transformers import activations
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        "mb_layers.transformers needs transformers >= 5.17; install it with "
        "pip install 'mb-layers[transformers]'"
    ) from error

IMPLEMENTATION = "mb"

# Activations: transformers' name in a config, and ours. A GLU has another name here, see below.
PLAIN_NAMES = {
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
GLU_NAMES = {plain: glu for glu, plain in GLU_ACTIVATIONS.items()}


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
    names = (
        name_of_w1,
        "down_proj",
        *((f"{name_of_w1}_bias", "down_proj_bias") if self.has_bias else ()),
    )
    (x_TD,) = cast_alike(hidden_states)
    # PEFT's adapters are kept apart from the weights: there is no merged copy of all experts.
    weights: list[Any] = [
        map_weight(weight_of(self, name), lambda w: to_plain(w, num_experts).to(x_TD.dtype))
        for name in names
    ]
    w1, w2, *biases = weights
    bins = mb_kernels.bin_tokens(top_k_index, num_experts)
    weights_TK = at_least_fp32(top_k_weights)
    activation = fused_activation(self)
    b1, b2 = biases or (None, None)
    gate = self._apply_gate if self.has_gate else self.act_fn
    if activation is not None and isinstance(w1, Tensor) and isinstance(w2, Tensor):
        if self.is_transposed:
            w1, w2 = w1.mT, w2.mT
        y_TD = mb_kernels.expert_mlp(
            x_TD, w1, w2, bins, weights_TK, activation=activation, b1_EF=b1, b2_ED=b2
        )
    else:
        y_TD = expert_mlp_in_steps(
            x_TD,
            w1,
            w2,
            bins,
            weights_TK,
            gate,
            b1=b1,
            b2=b2,
            transpose_weight=not self.is_transposed,
            after=self.post_expert_norm if getattr(self, "has_post_expert_norm", False) else None,
            learned=_learns(self),
        )
    return y_TD.to(hidden_states.dtype)


ExpertsInterface.register(IMPLEMENTATION, experts_forward)


def fused_activation(experts: Any) -> str | None:
    """Our name of the experts' activation if `expert_mlp` computes the same as they do."""
    if getattr(experts, "has_post_expert_norm", False):
        return None
    if experts.has_gate and has_own_gate(experts):
        return getattr(experts, _RECOGNISED, None)
    plain = activation_name(experts.act_fn)
    return GLU_NAMES.get(plain or "") if experts.has_gate else plain


_RECOGNISED = "_mb_gate"  # the attribute of a module for our name of its gate


def recognise_gate(experts: Any) -> None:
    """Let experts with their own gate run fused if `expert_mlp` has an activation equal to it.

    Possible names are made from the parameters that transformers' classes have. A name is taken if
    it gives what the gate gives for sample pairs of values from -1e6 to 1e6. So nothing is assumed
    about a class, which may change in transformers' next release. Call it again if the module's
    parameters change.
    """
    setattr(experts, _RECOGNISED, None)
    if not experts.has_gate or not has_own_gate(experts) or _learns(experts):
        return
    n = _PROBE.numel()
    gate, up = _PROBE[:, None].expand(n, n), _PROBE[None, :].expand(n, n)
    interleaved = not getattr(experts, "is_concatenated", True)
    if interleaved:
        h = torch.stack([gate, up], dim=-1).flatten(-2)
    else:
        h = torch.cat([gate, up], dim=-1)
    with torch.no_grad():
        theirs = experts._apply_gate(h)
    for name in _names_of_gate(experts):
        ours = activate_gated(gate, up, name)
        if torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            words = [name.removesuffix(")"), "interleaved)"]
            joint = ", " if name.endswith(")") else "("
            setattr(experts, _RECOGNISED, joint.join(words) if interleaved else name)
            return


_MAGNITUDES = torch.logspace(-2, 6, 65, dtype=torch.float32, device="cpu")
_PROBE = torch.cat([-_MAGNITUDES, _MAGNITUDES])


def _names_of_gate(experts: Any) -> list[str]:
    """Names that the gate may have, from the parameters of the module."""
    act_fn = getattr(experts, "act_fn", None)
    base = GLU_NAMES.get("silu" if act_fn is None else activation_name(act_fn) or "silu", "swiglu")
    limit = getattr(experts, "swiglu_limit", getattr(experts, "limit", None))
    alpha = getattr(experts, "swiglu_alpha", getattr(experts, "alpha", None))
    caps = [
        getattr(getattr(act_fn, name, None), "softcap", None)
        for name in ("gate_softcap", "up_softcap")
    ]
    names = [base]
    if limit is not None:
        names.append(f"{base}(limit={limit})")
    if limit is not None and alpha is not None:
        names.append(gate_of_gpt_oss(alpha, limit))
    if None not in caps:
        names.append("swiglu(gate_cap={}, up_cap={})".format(*caps))
    return [name for name in names if _is_name(name)]


def gate_of_gpt_oss(alpha: float, limit: float) -> str:
    """The name of GPT-OSS's gate with these numbers; an infinite limit is none."""
    limited = f"limit={limit}, " if limit < math.inf else ""
    return f"swiglu(alpha={alpha}, {limited}offset=1)"


def _is_name(name: str) -> bool:
    """Whether there is such an activation: of numbers that are 0 or below there is none."""
    try:
        parse(name)
    except ValueError:
        return False
    return True


def has_own_gate(experts: Any) -> bool:
    """Whether the gate is not the one that transformers gives by default."""
    return experts._apply_gate.__module__ != ExpertsInterface.__module__


def _learns(experts: Any) -> bool:
    """Whether there are learned parameters besides the projections, of a gate or activation."""
    known = ("gate_up_proj", "up_proj", "down_proj", "parametrizations")
    names = (name.partition(".")[0] for name, _ in experts.named_parameters())
    return any(name.removesuffix("_bias") not in known for name in names)


def refuse_few_bits(name: str, module: nn.Module) -> None:
    """Raise for experts of a quantised model: their codes mean nothing without its scales."""
    experts: Any = getattr(module, "experts", module)  # Llama-4's are inside the block
    dtypes = {p.dtype for p in experts.parameters() if p.element_size() < 2}
    if dtypes or isinstance(experts, nn.ModuleList):
        kind = " in ".join([type(experts).__name__, *map(str, dtypes)])
        raise ValueError(
            f"expected the experts {name!r} stacked in 16 bits or more, got {kind}; load the model "
            "without quantization_config or with dequantize=True; freeze_in_bits makes 8 or 4 bits "
            "of it"
        )


def refuse_offloaded(name: str, module: nn.Module) -> None:
    """Raise if accelerate loads the weights of the module only while its parts are called."""
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    if any(getattr(hook, "offload", False) for hook in hooks):
        raise ValueError(
            f"expected {name!r} with its weights in memory, got some accelerate has offloaded; "
            "load the model with a device_map without cpu or disk for them"
        )


def refuse_offload_by_other_names(router: nn.Module) -> None:
    """Raise if accelerate looks for the weights of a swapped block by names that they lack there.

    It takes them out of the model by the names of the state dict, the original block's, and brings
    them back by those of the modules. The router stands for the whole layer.
    """
    weights = getattr(getattr(router, "_hf_hook", None), "weights_map", None)
    if weights is not None and "weight" not in weights:
        raise ValueError(
            "expected accelerate to offload a swapped block's weights by the names of its "
            "parameters, got those of the state dict, which are the original block's: give "
            "cpu_offload and dispatch_model state_dict={n: t.detach() for n, t in "
            "[*model.named_parameters(), *model.named_buffers()]}, for a disk written to "
            "offload_dir by accelerate.utils.offload_state_dict; or take "
            "mb_layers.transformers.use, which keeps the names"
        )


def activation_name(act_fn: object) -> str | None:
    """Our name of an ungated activation, a module of transformers' or a function of torch's."""
    if act_fn in _FUNCTIONS:
        return _FUNCTIONS[act_fn]
    return next((ours for kind, ours in _ACTIVATIONS if _is_a(act_fn, kind)), None)


def glu_name(act_fn: object) -> str:
    """Our name of a GLU whose gate has this activation; ValueError if there is none."""
    plain = activation_name(act_fn)
    if plain not in GLU_NAMES:
        raise ValueError(f"expected experts with SiLU, GELU or ReLU, got {act_fn!r}")
    return GLU_NAMES[plain]


def _is_a(act_fn: object, prototype: nn.Module) -> bool:
    """Same class and, where the class wraps one of several functions, the same function."""
    if type(act_fn) is not type(prototype):
        return False
    act, like = getattr(act_fn, "act", None), getattr(prototype, "act", None)
    same_function = getattr(act, "__name__", str(act)) == getattr(like, "__name__", str(like))
    return same_function and (  # nn.GELU is two functions
        getattr(act_fn, "approximate", None) == getattr(prototype, "approximate", None)
    )


_ACTIVATIONS = [
    *((activations.ACT2FN[theirs], ours) for theirs, ours in PLAIN_NAMES.items()),
    (nn.SiLU(), "silu"),
    (nn.GELU(), "gelu"),
    (nn.GELU(approximate="tanh"), "gelu_tanh"),
    (nn.ReLU(), "relu"),
]
_FUNCTIONS: dict[object, str] = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
