"""MegaBlocks' `Arguments`, and the layer they describe.

Every field is in `FIELDS`, with what becomes of it. A value that this library does not honour is
refused by name, with the reason; none is dropped in silence. The page `docs/from-megablocks.md`
holds the same table and their calls beside ours.

Letters: E experts, D hidden, F expert ffn width.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from mb_kernels.activation import GLU_ACTIVATIONS
from torch import Tensor, nn

from mb_layers.config import MoEConfig
from mb_layers.dispatch import TokenDispatcher
from mb_layers.moe import MoE, dMoE

Layer = Literal["dMoE", "MoE"]

# Field -> what becomes of it. The page docs/from-megablocks.md repeats these lines.
FIELDS = {
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_layers": "not needed: a layer returns its own loss, a model takes the mean",
    "bias": "output_bias, and shared_expert_bias if there is a shared expert",
    "return_bias": "no effect: y already holds the bias",
    "activation_fn": "activation, with mlp_type; GELU (exact, tanh), SiLU, ReLU, else refused",
    "moe_num_experts": "num_experts",
    "moe_top_k": "top_k",
    "moe_capacity_factor": "capacity_factor of MoE; 0, no dropping, gives a dMoE",
    "moe_normalize_expert_weights": "renormalize with renormalize_p of 1 or 2, else refused",
    "moe_loss_weight": "load_balancing_loss_weight",
    "moe_jitter_eps": "jitter_eps",
    "moe_lbl_in_fp32": "no effect: the loss is always in fp32",
    "moe_expert_model_parallelism": "pass dispatcher= to layer_from_arguments; refused without one",
    "expert_parallel_group": "the dispatcher holds the group; refused without one",
    "moe_weight_parallelism": "refused: apply FSDP2's fully_shard to the layer",
    "weight_parallel_group": "refused: FSDP2 takes a device mesh",
    "pipeline_model_parallel_size": "not needed: it only served to check the list of losses",
    "num_layers_per_virtual_pipeline_stage": "not needed: as above",
    "memory_optimized_mlp": "no effect: grouped experts always keep just x and the pre-activations",
    "mlp_type": "activation: 'glu' makes it gated; refused for MoE, which ignores it there",
    "mlp_impl": "mlp_impl",
    "quantize_inputs_num_bits": "no effect: x itself is kept, for top-1 on a GPU sorted too",
    "quantize_rematerialize_num_bits": "saved_activation_bits, if memory_optimized_mlp is set",
    "quantize_scatter_num_bits": "no effect: grouped experts keep no outputs at all",
    "fp16": "dtype of the layer; wins over bf16, as in MegaBlocks",
    "bf16": "dtype of the layer; torch's default dtype, fp32 mostly, if neither is set",
    "device": "device of the layer",
    "init_method": "init_method_std for a normal init; any other function is called on the weights",
    "output_layer_init_method": "output_init_std, or called on w2",
    "uniform_expert_assignment": "uniform_assignment",
    "shared_expert": "shared_expert_hidden_size",
    "fc_cls": "refused unless nn.Linear: the shared expert is one fused op",
    "fc_kwargs": "refused unless empty: as above",
    "remat_act_fn": "no effect: MegaBlocks never reads it",
    "shared_expert_hidden_size": "shared_expert_hidden_size, ffn_hidden_size if it is None",
    "shared_expert_weighted_sum": "shared_expert_weighted_sum",
    "moe_zloss_weight": "z_loss_weight",
    "moe_zloss_in_fp32": "no effect: the loss is always in fp32",
}

# Our name of a field in an error message -> theirs.
_THEIR_NAMES = {
    "num_experts": "moe_num_experts",
    "top_k": "moe_top_k",
    "capacity_factor": "moe_capacity_factor",
    "renormalize": "moe_normalize_expert_weights",
    "renormalize_p": "moe_normalize_expert_weights",
    "jitter_eps": "moe_jitter_eps",
    "load_balancing_loss_weight": "moe_loss_weight",
    "z_loss_weight": "moe_zloss_weight",
    "uniform_assignment": "uniform_expert_assignment",
    "shared_expert_bias": "bias",
    "saved_activation_bits": "quantize_rematerialize_num_bits",
}


_GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def _normal_init() -> Callable[[Tensor], Any]:
    return functools.partial(nn.init.normal_, mean=0.0, std=0.02)


@dataclasses.dataclass
class Arguments:
    """MegaBlocks' `Arguments`: the same fields, defaults and order; what they mean is in `FIELDS`.

    `device` None is torch's default device; MegaBlocks' default needs a GPU to be there.
    """

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[[Tensor], Tensor] = _GELU_TANH
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: float = 1
    moe_normalize_expert_weights: int | float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False
    moe_expert_model_parallelism: bool = False
    expert_parallel_group: Any = None
    moe_weight_parallelism: bool = False
    weight_parallel_group: Any = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "grouped"
    quantize_inputs_num_bits: int = -1
    quantize_rematerialize_num_bits: int = -1
    quantize_scatter_num_bits: int = -1
    fp16: bool = True
    bf16: bool = False
    device: Any = None
    init_method: Callable[[Tensor], Any] = dataclasses.field(default_factory=_normal_init)
    output_layer_init_method: Callable[[Tensor], Any] = dataclasses.field(
        default_factory=_normal_init
    )
    uniform_expert_assignment: bool = False
    shared_expert: bool = False
    fc_cls: type = nn.Linear
    fc_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and value not in (True, False, None):
                raise ValueError(f"expected {field.name} to be True or False, got {value!r}")


def from_megatron(megatron_arguments: object) -> Arguments:
    """Return `Arguments` with the fields that Megatron's namespace has; the others by default.

    Raises:
        ValueError: it has none of them.
    """
    names = {name for name in FIELDS if hasattr(megatron_arguments, name)}
    if not names:
        raise ValueError(
            "expected megablocks.Arguments, or a mapping or namespace with some of its fields, got "
            f"{megatron_arguments!r}"
        )
    return Arguments(**{name: getattr(megatron_arguments, name) for name in names})


def layer_from_arguments(
    arguments: object, *, layer: Layer = "dMoE", dispatcher: TokenDispatcher | None = None
) -> dMoE | MoE:
    """Return the layer that `megablocks.layers.dmoe.dMoE(arguments)` (or `moe.MoE`) would be.

    Args:
        arguments: MegaBlocks' `Arguments`, a mapping with its fields, or a namespace (as for
            `from_megatron`; attributes that `Arguments` does not have are ignored there).
        layer: which of the two classes.
        dispatcher: needed with moe_expert_model_parallelism.

    Raises:
        ValueError: a field is unknown, or has a value that is not honoured.
    """
    given = read_arguments(arguments)
    config = _config(given, layer, dispatcher)
    dtype = None
    if given.fp16 or given.bf16:
        dtype = torch.float16 if given.fp16 else torch.bfloat16
    if given.fp16 and given.bf16:
        warnings.warn(
            "fp16 and bf16 are both True: MegaBlocks makes the layer fp16, and so do we. Its "
            "default is fp16=True; set fp16=False for bf16.",
            stacklevel=2,
        )
    cls = dMoE if config.capacity_factor is None else MoE
    device = given.device() if callable(given.device) else given.device
    built = cls(config, dispatcher=dispatcher, device=device, dtype=dtype)
    experts = built.experts
    halves = experts.w1.detach().chunk(2 if config.is_glu else 1, dim=1)
    for init, weights in (
        (given.init_method, (built.router.get_parameter("weight").detach(), *halves)),
        (given.output_layer_init_method, (experts.w2.detach().transpose(1, 2),)),
    ):
        if _normal_std(init) is None:
            for weight in weights:
                # Contiguous as in MegaBlocks: some functions, orthogonal_ for one, need a view.
                drawn = weight.contiguous()
                init(drawn)
                weight.copy_(drawn)
    return built


def config_from_arguments(
    arguments: object, *, layer: Layer = "dMoE", dispatcher: TokenDispatcher | None = None
) -> MoEConfig:
    """Return the `MoEConfig` of MegaBlocks' `arguments`; see `layer_from_arguments`.

    A config holds the std of a normal init alone; another init function is `layer_from_arguments`'
    to apply.
    """
    return _config(read_arguments(arguments), layer, dispatcher)


def read_arguments(arguments: object) -> Arguments:
    """Return `Arguments` of an object like it, a mapping, or a namespace with some of its fields.

    Raises:
        ValueError: a mapping or dataclass has a field that `Arguments` does not.
    """
    if isinstance(arguments, Arguments):
        return arguments
    if isinstance(arguments, Mapping):
        given = dict(arguments)
    elif dataclasses.is_dataclass(arguments):
        given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    else:
        return from_megatron(arguments)
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"expected fields of megablocks.Arguments, got {name!r}{hint}")
    return Arguments(**given)


def _config(given: Arguments, layer: Layer, dispatcher: TokenDispatcher | None) -> MoEConfig:
    if layer not in ("dMoE", "MoE"):
        raise ValueError(f"expected layer to be 'dMoE' or 'MoE', got {layer!r}")
    _refuse(given, dispatcher)
    if given.mlp_type not in ("mlp", "glu"):
        raise ValueError(f"expected mlp_type 'mlp' or 'glu', got {given.mlp_type!r}")
    if given.mlp_type == "glu" and layer == "MoE":
        raise ValueError(
            "expected mlp_type='mlp' for MoE, got 'glu': MegaBlocks ignores it there and builds a "
            "plain MLP; use dMoE, or MoEConfig(activation=...) for a gated MoE"
        )
    p = given.moe_normalize_expert_weights
    saved_bits = -1
    if given.memory_optimized_mlp:
        saved_bits = given.quantize_rematerialize_num_bits
    shared_width = None
    if given.shared_expert:
        shared_width = given.shared_expert_hidden_size
        if shared_width is None:
            shared_width = given.ffn_hidden_size
    stds = {
        "init_method_std": _normal_std(given.init_method),
        "output_init_std": _normal_std(given.output_layer_init_method),
    }
    fields: dict[str, Any] = {name: std for name, std in stds.items() if std is not None}
    fields |= {
        "hidden_size": given.hidden_size,
        "ffn_hidden_size": given.ffn_hidden_size,
        "num_experts": given.moe_num_experts,
        "top_k": given.moe_top_k,
        "activation": _activation(given.activation_fn, given.mlp_type),
        "capacity_factor": (given.moe_capacity_factor or None) if layer == "MoE" else None,
        "renormalize": bool(p),
        "renormalize_p": p or 1,
        "jitter_eps": given.moe_jitter_eps or 0.0,
        "uniform_assignment": bool(given.uniform_expert_assignment),
        "load_balancing_loss_weight": given.moe_loss_weight,
        "z_loss_weight": given.moe_zloss_weight,
        "output_bias": bool(given.bias),
        "mlp_impl": given.mlp_impl,
        "saved_activation_bits": saved_bits if saved_bits != -1 else None,
        "shared_expert_hidden_size": shared_width,
        "shared_expert_bias": shared_width is not None and bool(given.bias),
        "shared_expert_weighted_sum": (
            shared_width is not None and bool(given.shared_expert_weighted_sum)
        ),
    }
    try:
        return MoEConfig(**fields)
    except ValueError as error:
        names = "|".join(_THEIR_NAMES)
        message = re.sub(rf"\b({names})\b", lambda m: _THEIR_NAMES[m[0]], str(error))
        raise ValueError(message) from None


def _refuse(given: Arguments, dispatcher: TokenDispatcher | None) -> None:
    unwanted = {
        "moe_weight_parallelism": bool(given.moe_weight_parallelism),
        "weight_parallel_group": given.weight_parallel_group is not None,
        "fc_cls": given.fc_cls is not nn.Linear and bool(given.shared_expert),
        "fc_kwargs": bool(given.fc_kwargs) and bool(given.shared_expert),
    }
    for name in ("init_method", "output_layer_init_method"):
        if not callable(init := getattr(given, name)):
            raise ValueError(f"expected {name} to be a function that fills a tensor, got {init!r}")
    for name in ("inputs", "rematerialize", "scatter"):
        bits = getattr(given, f"quantize_{name}_num_bits")
        if bits not in (-1, 4, 8):
            raise ValueError(f"expected quantize_{name}_num_bits of -1, 4 or 8, got {bits!r}")
    if dispatcher is None:
        unwanted["moe_expert_model_parallelism"] = bool(given.moe_expert_model_parallelism)
        unwanted["expert_parallel_group"] = given.expert_parallel_group is not None
    for name, refused in unwanted.items():
        if refused:
            raise ValueError(f"{name}={getattr(given, name)!r}: {FIELDS[name]}")


def _activation(activation_fn: Callable[[Tensor], Tensor], mlp_type: str) -> str:
    known: dict[Any, str] = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", torch.relu: "relu"}
    function, options = activation_fn, {}
    if isinstance(function, functools.partial) and not function.args:  # LLM Foundry makes them
        function, options = function.func, function.keywords
    plain = known.get(function) if isinstance(function, Hashable) else None
    if plain == "gelu" and options.get("approximate") == "tanh":
        plain = "gelu_tanh"
    if isinstance(function, nn.GELU):
        plain = "gelu_tanh" if function.approximate == "tanh" else "gelu"
    elif isinstance(function, (nn.SiLU, nn.ReLU)):
        plain = "silu" if isinstance(function, nn.SiLU) else "relu"
    if plain is None:
        raise ValueError(
            f"activation_fn={activation_fn!r}: expected torch's gelu (exact or tanh), silu or "
            "relu; the kernels fuse the activation, so they must know it"
        )
    if mlp_type == "mlp":
        return plain
    return next(glu for glu, gate in GLU_ACTIVATIONS.items() if gate == plain)


def _normal_std(init: Callable[[Tensor], Any]) -> float | None:
    """The std of a zero-mean `torch.nn.init.normal_`, None for any other init."""
    if not isinstance(init, functools.partial) or init.func is not nn.init.normal_ or init.args:
        return None
    options = {"mean": 0.0, "std": 1.0} | init.keywords
    return options["std"] if options.keys() == {"mean", "std"} and not options["mean"] else None
