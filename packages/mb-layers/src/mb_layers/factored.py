"""Experts' weights in several parts: low-rank adapters, and frozen weights in few bits.

A weight W + s B A is never formed. Its product with the rows is x W^T + s (x A^T) B^T: two grouped
products of rank r besides that with the frozen weight. A `FrozenWeight` in 4 or 8 bits is decoded
for each product and freed after it, in the backward pass too. Adapters are torch parametrizations
of the stacked weights, so that state dicts, copies and code that reads `experts.w1` work as usual.
PEFT's adapters (`target_parameters`) have the same attributes and are treated alike.

    add_lora(layer.experts, rank=8, alpha=16)      # freezes w1 and w2, trains the adapters
    merge_lora(layer.experts)                      # adds them to the weights

Letters: E experts, N rows, r rank, R rows and C columns of a weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mb_kernels
import torch
import torch.nn.functional as F
from mb_kernels.exporting import is_exporting
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mb_layers import arguments
from mb_layers.frozen import FrozenWeight
from mb_layers.tensors import draw, is_dtensor


class LowRank(NamedTuple):
    """scaling * lhs @ rhs, lhs [E, R, r] and rhs [E, r, C]."""

    lhs: Tensor
    rhs: Tensor
    scaling: float


class Factored(NamedTuple):
    """A weight [E, R, C]: the base, plain or a `FrozenWeight`, and what is added to it."""

    base: Tensor
    added: tuple[LowRank, ...]


class LoRA(nn.Module):
    """Parametrization W -> W + alpha / r * b @ a, with `a` [E, r, C] and `b` [E, R, r], b zero."""

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        num_experts, rows, columns = weight.shape
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.a = nn.Parameter(torch.empty(num_experts, rank, columns, **options))
        self.b = nn.Parameter(torch.empty(num_experts, rows, rank, **options))
        self.scaling = float(alpha) / int(rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `a` from U(-1 / sqrt(C), 1 / sqrt(C)) and zero `b`: nothing is added at first."""
        width = 1 / math.sqrt(self.a.shape[2])
        draw(self.a, functools.partial(nn.init.uniform_, a=-width, b=width))
        nn.init.zeros_(self.b)

    @property
    def lhs(self) -> Tensor:
        return self.b

    @property
    def rhs(self) -> Tensor:
        return self.a

    def forward(self, weight: Tensor) -> Tensor:
        """The merged weight, for those who ask for it."""
        return weight + self.scaling * (self.b @ self.a).to(weight.dtype)


def add_lora(
    experts: nn.Module, *, rank: int, alpha: float, names: tuple[str, ...] = ("w1", "w2")
) -> None:
    """Freeze the stacked weights of `Experts` and put trainable low-rank adapters on them.

    Args:
        experts: `layer.experts`, its weights plain or frozen in bits.
        rank: of each expert's adapter; kernels compute with the next multiple of 16.
        alpha: the adapter's product is scaled by alpha / rank.
        names: which weights.

    Raises:
        ValueError: a rank that is no integer >= 1, an alpha that is no finite number, no experts of
            a `dMoE` or `MoE`, other names, some whose options need the fused op, or weights that
            are spread over ranks already.
    """
    config = _config_of(experts)
    arguments.several_names(names)
    if not {*names} <= {"w1", "w2"}:
        raise ValueError(f"expected names of weights, 'w1' and 'w2', got {names!r}")
    arguments.at_least_1(rank=rank)
    arguments.finite(alpha=alpha)
    if config.mlp_impl != "grouped" or config.saved_activation_bits is not None:
        raise ValueError(
            "expected mlp_impl='grouped' and saved_activation_bits=None for adapters, got "
            f"{config.mlp_impl!r} and {config.saved_activation_bits}; recompute=True saves memory"
        )
    if config.fp8:
        raise ValueError(
            "expected fp8=False for adapters, whose products are not rounded, got True; build the "
            "layer without it"
        )
    if any(map(is_dtensor, experts.parameters())):
        raise ValueError(
            "expected experts that are not spread over ranks, got DTensors; add adapters first, "
            "which are then spread with the experts"
        )
    for name in names:
        with torch.no_grad():
            adapter = LoRA(getattr(experts, name), rank=rank, alpha=alpha)
        parametrize.register_parametrization(experts, name, adapter, unsafe=True)
        # The weight, or what another parametrization makes it of; not the adapters before this one.
        made = experts.get_submodule(f"parametrizations.{name}")
        for base in made.parameters(recurse=False):
            base.requires_grad_(False)


def merge_lora(experts: nn.Module) -> None:
    """Add the adapters to the weights, which are plain parameters again and trainable.

    Weights frozen in bits are decoded for it, adapters or not. Raises ValueError for no experts of
    a `dMoE` or `MoE`.
    """
    _config_of(experts)
    for name in ("w1", "w2"):
        adapted = parametrize.is_parametrized(experts, name)
        if not adapted and not isinstance(experts._parameters[name], FrozenWeight):
            # It stays what it is: an optimizer trains this object, and other layers may share it.
            experts.get_parameter(name).requires_grad_(True)
            continue
        with torch.no_grad():
            merged = getattr(experts, name).detach()
        if adapted:
            # torch takes the weight's property off the class, which deep copies share.
            kind = type(experts)
            experts.__class__ = type(kind.__name__, kind.__bases__, dict(kind.__dict__))
            parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
        if isinstance(merged, FrozenWeight):
            merged = merged.decoded()
        experts.register_parameter(name, nn.Parameter(merged))


def _config_of(experts: nn.Module) -> Any:
    arguments.a_module(experts=experts)
    config: Any = getattr(experts, "config", None)
    # Not hasattr, which would add the adapters to the weight.
    has_weights = "w1" in experts._parameters or parametrize.is_parametrized(experts, "w1")
    if not (hasattr(config, "mlp_impl") and has_weights):
        raise ValueError(
            f"expected `layer.experts` with w1, w2, got {type(experts).__name__}; for the experts "
            "of a transformers model give PEFT their names as target_parameters"
        )
    return config


def base_of(module: nn.Module, name: str) -> tuple[Any, list[Any]]:
    """A module's weight before parametrization, and the list of its parametrizations.

    The weight is None if a parametrization keeps it as several tensors, as weight_norm does.
    """
    if not parametrize.is_parametrized(module, name):
        return module._parameters.get(name), []
    parametrizations: Any = module.parametrizations
    made = parametrizations[name]
    return getattr(made, "original", None), list(made)


def weight_of(module: nn.Module, name: str) -> Tensor | Factored:
    """Return a module's weight, its parts unmerged where it is made of parts known here."""
    base, adapters = base_of(module, name)
    if base is None or not all(hasattr(a, "lhs") and hasattr(a, "rhs") for a in adapters):
        return getattr(module, name)
    if isinstance(base, FrozenWeight):
        # An alias: parametrize, and so PEFT, refuses a parameter that autograd holds.
        base = base.detach()
    elif not adapters:
        return base
    return Factored(base, tuple(LowRank(a.lhs, a.rhs, a.scaling) for a in adapters))


class WeightSpec(NamedTuple):
    """What `flatten` keeps of a weight besides its tensors."""

    factored: bool
    frozen: tuple[int, torch.dtype] | None
    scalings: tuple[float, ...]


def flatten(weight: Tensor | Factored) -> tuple[WeightSpec, list[Tensor]]:
    """Take a weight apart into a spec and plain tensors, the base's before the adapters'."""
    if isinstance(weight, Tensor):
        return WeightSpec(False, None, ()), [weight]
    base = weight.base
    frozen, tensors = None, [base]
    if isinstance(base, FrozenWeight):
        frozen, tensors = (base.bits, base.dtype), [base.codes, base.scales]
    for lhs, rhs, _ in weight.added:
        tensors += (lhs, rhs)
    return WeightSpec(True, frozen, tuple(added.scaling for added in weight.added)), tensors


def unflatten(spec: WeightSpec, tensors: Sequence[Tensor]) -> Tensor | Factored:
    """The inverse of `flatten`."""
    base, *added = tensors
    if not spec.factored:
        return base
    if spec.frozen is not None:
        scales, *added = added
        base = FrozenWeight(base, scales, *spec.frozen)
    pairs = zip(added[::2], added[1::2], spec.scalings, strict=True)
    return Factored(base, tuple(LowRank(*parts) for parts in pairs))


def map_weight(weight: Tensor | Factored, fn: Callable[[Tensor], Tensor]) -> Tensor | Factored:
    """Apply fn to the tensors of a weight; a frozen one stays as it is."""
    if isinstance(weight, Tensor):
        return fn(weight)
    base = weight.base if isinstance(weight.base, FrozenWeight) else fn(weight.base)
    added = (LowRank(fn(lhs), fn(rhs), scaling) for lhs, rhs, scaling in weight.added)
    return Factored(base, tuple(added))


def grouped_linear(
    x_NC: Tensor, weight: Tensor | Factored, offsets_E1: Tensor, *, transpose_weight: bool = True
) -> Tensor:
    """`mb_kernels.grouped_gemm` with a weight in parts. All but codes and scales have x's dtype."""
    if isinstance(weight, Tensor):
        return mb_kernels.grouped_gemm(x_NC, weight, offsets_E1, transpose_weight=transpose_weight)
    base = weight.base
    if isinstance(base, FrozenWeight):
        # A saved program holds no function of ours.
        product = _frozen_product if is_exporting() else _FrozenProduct.apply
        parts = (base.codes, base.scales, base.bits)
        y_NR = product(x_NC, *parts, offsets_E1, transpose_weight)
    else:
        y_NR = grouped_linear(x_NC, base, offsets_E1, transpose_weight=transpose_weight)
    for lhs, rhs, scaling in map(_padded, weight.added):
        first, second = (rhs, lhs) if transpose_weight else (lhs, rhs)
        u_Nr = grouped_linear(x_NC, first, offsets_E1, transpose_weight=transpose_weight)
        y_NR = y_NR + scaling * grouped_linear(
            u_Nr, second, offsets_E1, transpose_weight=transpose_weight
        )
    return y_NR


def weight_gradients(
    dy_NR: Tensor,
    x_NC: Tensor,
    weight: Tensor | Factored,
    offsets_E1: Tensor,
    wanted: Sequence[bool],
    transpose_weight: bool,
) -> list[Tensor | None]:
    """Gradients of `grouped_linear` for the tensors of `flatten(weight)` that are wanted."""
    # The weight's gradient is p^T q, [R, C] whichever way the product took it.
    p, q = (dy_NR, x_NC) if transpose_weight else (x_NC, dy_NR)
    grads: list[Tensor | None] = [None] * len(wanted)
    grads[0] = grouped_outer(p, q, offsets_E1) if wanted[0] else None
    if isinstance(weight, Tensor):
        return grads
    start = len(wanted) - 2 * len(weight.added)
    for n, added in enumerate(weight.added):
        at, rank = start + 2 * n, added.lhs.shape[2]
        lhs, rhs, scaling = _padded(added)
        # Not by slices: one of all columns is an alias, of which vmap knows nothing.
        if wanted[at]:
            u_Nr = grouped_linear(q, rhs, offsets_E1, transpose_weight=True)
            grads[at] = scaling * grouped_outer(p, u_Nr, offsets_E1).narrow(2, 0, rank)
        if wanted[at + 1]:
            u_Nr = grouped_linear(p, lhs, offsets_E1, transpose_weight=False)
            grads[at + 1] = scaling * grouped_outer(u_Nr, q, offsets_E1).narrow(1, 0, rank)
    return grads


def grouped_outer(a_NR: Tensor, b_NC: Tensor, offsets_E1: Tensor) -> Tensor:
    """Each expert's a^T b over its rows, [E, R, C]."""
    return mb_kernels.gmm(a_NR, b_NC, offsets_E1.diff(), trans_a=True)


def _padded(added: LowRank) -> LowRank:
    """Pad an adapter with zeros to a rank that kernels take, instead of at every product."""
    more = -added.lhs.shape[2] % 16
    if not more:
        return added
    return LowRank(F.pad(added.lhs, (0, more)), F.pad(added.rhs, (0, 0, 0, more)), added.scaling)


def _frozen_product(
    x_NC: Tensor,
    codes: Tensor,
    scales: Tensor,
    bits: int,
    offsets_E1: Tensor,
    transpose_weight: bool,
) -> Tensor:
    weight = mb_kernels.dequantize(codes, scales, bits=bits, dtype=x_NC.dtype)
    return mb_kernels.grouped_gemm(x_NC, weight, offsets_E1, transpose_weight=transpose_weight)


class _FrozenProduct(torch.autograd.Function):
    """Rows times a weight in codes; of these two only the codes are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        codes: Tensor,
        scales: Tensor,
        bits: int,
        offsets_E1: Tensor,
        transpose_weight: bool,
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, offsets_E1)
        ctx.bits, ctx.transpose_weight = bits, transpose_weight
        return _frozen_product(x_NC, codes, scales, bits, offsets_E1, transpose_weight)

    @staticmethod
    def backward(ctx: Any, grad_NR: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # ty: ignore[incompatible-method-override]
        codes, scales, offsets_E1 = ctx.saved_tensors
        grad_NC = _frozen_product(
            grad_NR.contiguous(), codes, scales, ctx.bits, offsets_E1, not ctx.transpose_weight
        )
        return grad_NC, None, None, None, None, None
