"""Frozen weights in 4 or 8 bits, as tensors.

`FrozenWeight` is a tensor of the weight's shape and dtype that holds codes and scales. The experts
here multiply by it without keeping it decoded (`mb_layers.factored`); to every other operation it
is the decoded weight. So whatever takes a parameter takes it: state dicts, copies, casts, and
PEFT's `target_parameters`, whose merge rounds the sum to the same number of bits.

Letters: E experts, R rows and C columns of a weight.
"""

from __future__ import annotations

from typing import Any, Self

import mb_kernels
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class FrozenWeight(Tensor):
    """A weight [E, R, C] in codes and scales of `mb_kernels.quantize`, whose error bound it has."""

    codes: Tensor
    scales: Tensor
    bits: int

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> FrozenWeight:
        shape = (*codes.shape[:-1], codes.shape[-1] * (8 // bits))
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.bits = codes, scales, bits

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> Self:
        """Round a weight; in 4 bits C must be even."""
        return cls(*mb_kernels.quantize(weight.detach(), bits), bits, weight.dtype)

    def decoded(self) -> Tensor:
        """The weight as a plain tensor."""
        return mb_kernels.dequantize(self.codes, self.scales, bits=self.bits, dtype=self.dtype)

    def __repr__(self) -> str:  # ty: ignore[incompatible-method-override]
        return f"FrozenWeight({tuple(self.shape)}, {self.dtype}, bits={self.bits})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype]]:
        return ["codes", "scales"], (self.bits, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[int, torch.dtype], *_: Any
    ) -> FrozenWeight:
        return FrozenWeight(parts["codes"], parts["scales"], *context)

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0]
        if func in _ON_PARTS and isinstance(weight, cls):
            dtype = kwargs.pop("dtype", None) or weight.dtype
            codes, scales = (func(t, *args[1:], **kwargs) for t in (weight.codes, weight.scales))
            return cls(codes, scales, weight.bits, dtype)
        if func in _IN_PLACE and isinstance(weight, cls):
            rounded = cls.of(_IN_PLACE[func](*tree_map(_decoded, args), **kwargs), weight.bits)
            weight.codes.copy_(rounded.codes)
            weight.scales.copy_(rounded.scales)
            return weight
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


# What moves or copies a weight does so to its parts.
_ON_PARTS = {aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default}
# What changes one rounds the result: loading a checkpoint, merging adapters.
_IN_PLACE: dict[Any, Any] = {
    aten.copy_.default: lambda weight, source, *_: source.to(weight.device, weight.dtype),
    aten.add_.Tensor: torch.add,
    aten.sub_.Tensor: torch.sub,
}

# So that torch.load reads a state dict with such weights.
torch.serialization.add_safe_globals([FrozenWeight])


def _decoded(value: Any) -> Any:
    return value.decoded() if isinstance(value, FrozenWeight) else value


def freeze_in_bits(experts: nn.Module, bits: int, *, names: tuple[str, ...] = ("w1", "w2")) -> None:
    """Keep stacked weights [E, R, C] frozen, in 4 or 8 bits; do it before adapters are put on.

    `torch.save` keeps codes and scales. `save_pretrained` writes plain memory, of which such a
    weight has none: pass it a `state_dict` with `weight.decoded()` in the place of each
    `FrozenWeight`, or save the adapters alone.

    Args:
        experts: `layer.experts`, or the experts of a transformers model.
        bits: 4 or 8; the weights' error is `mb_kernels.quantize`'s.
        names: of the weights; transformers' are "gate_up_proj" and "down_proj".

    Raises:
        ValueError: other bits, weights with adapters on, an odd number of columns in 4 bits.
    """
    for name in names:
        if name not in experts._parameters:
            raise ValueError(
                f"expected a parameter {name!r} to freeze, got {type(experts).__name__} with "
                f"{', '.join(experts._parameters) or 'none'}; freeze before add_lora"
            )
    for name in names:
        frozen = FrozenWeight.of(experts.get_parameter(name), bits)
        experts.register_parameter(name, nn.Parameter(frozen, requires_grad=False))
