"""Frozen weights in 4 or 8 bits, as tensors.

`FrozenWeight` is a tensor of the weight's shape and dtype that holds codes and scales. The experts
of this package multiply by it without keeping it decoded (`mb_layers.factored`). Every other
operation sees the decoded weight, and what is written into it is rounded. So it works wherever a
parameter does: in state dicts, copies, casts, and with PEFT's `target_parameters`, whose merge
rounds the sum to the same number of bits. A part or view of it (`weight[0]`) is a decoded copy:
`weight[0] = x` writes into the weight, `weight[0].copy_(x)` does not.

Letters: E experts, R rows and C columns of a weight.
"""

from __future__ import annotations

from typing import Any, Self

import mb_kernels
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mb_layers import arguments

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

    @property
    def data(self) -> Tensor:
        """The weight without autograd; set it to put another, rounded, in its place."""
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        other = value if isinstance(value, FrozenWeight) else self.of(value, self.bits)
        _DATA.__set__(self, other)  # shape, dtype and device, and nothing more
        self.codes, self.scales, self.bits = other.codes, other.scales, other.bits

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
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # Torch wants views of a tensor that is none of inference mode to be none either.
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        weight = args[0]
        if func in _ON_PARTS and isinstance(weight, cls):
            dtype = kwargs.get("dtype") or weight.dtype
            if func.is_view:  # an alias has the parts themselves, which count their writes
                return cls(weight.codes, weight.scales, weight.bits, dtype)
            if dtype.is_floating_point and dtype.itemsize > 1:  # codes are decoded to no other
                others = {name: value for name, value in kwargs.items() if name != "dtype"}
                parts = (func(t, *args[1:], **others) for t in (weight.codes, weight.scales))
                return cls(*parts, weight.bits, dtype)
        plain = {w: w.decoded() for w in tree_leaves((args, kwargs)) if isinstance(w, cls)}

        def decoded(value: Any) -> Any:
            return plain[value] if isinstance(value, cls) else value

        result = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        for written in _written(func._schema, args, kwargs):
            if isinstance(written, cls):  # loading a checkpoint, merging adapters
                rounded = cls.of(plain[written], written.bits)
                written.codes.copy_(rounded.codes)
                written.scales.copy_(rounded.scales)
                _count_write(written.codes, written.scales)
                result = written if isinstance(result, Tensor) else result
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write into a part. By a view, as torch does it, the write would end in a decoded copy."""
        plain = self.decoded()
        plain[index] = value
        self.copy_(plain)

    def storage(self) -> Any:
        """Say why there is none: safetensors, and so `save_pretrained`, ask for it."""
        raise ValueError(
            f"expected a tensor with memory of its own shape, got {self!r}, which has codes and "
            "scales; pass save_pretrained a state_dict with weight.decoded() in its place, or save "
            "the adapters alone; torch.save takes it as it is"
        )

    def share_memory_(self) -> Self:
        """Move codes and scales to memory that processes share."""
        self.codes.share_memory_()
        self.scales.share_memory_()
        return self


_DATA: Any = torch._C.TensorBase.data  # on the class it is what sets the attribute

# What moves, copies or allocates a weight does so to its parts.
_ON_PARTS = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.empty_like.default,  # `to_empty` of a layer built on the meta device
}

# So that torch.load reads a state dict with such weights.
torch.serialization.add_safe_globals([FrozenWeight])


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes into."""
    if not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    into = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tree_leaves([given.get(name) for name in into])


def _count_write(*parts: Tensor) -> None:
    """Count a write as autograd does, so that a graph that keeps these parts refuses to go on."""
    # Below autograd, where this runs, nobody counts. Tensors of inference mode cannot.
    torch.autograd.graph.increment_version([t for t in parts if not t.is_inference()])


def freeze_in_bits(experts: nn.Module, bits: int, *, names: tuple[str, ...] = ("w1", "w2")) -> None:
    """Keep stacked weights [E, R, C] frozen, in 4 or 8 bits; do it before adapters are put on.

    The experts' gradients reach no such weight, whatever its `requires_grad`.

    `torch.save` keeps codes and scales. `save_pretrained` writes plain memory, of which such a
    weight has none: pass it a `state_dict` with `weight.decoded()` in the place of each
    `FrozenWeight`, or save the adapters alone.

    Args:
        experts: `layer.experts`, or the experts of a transformers model.
        bits: 4 or 8; the weights' error is `mb_kernels.quantize`'s.
        names: of the weights; transformers' are "gate_up_proj" and "down_proj".

    Raises:
        ValueError: other bits, weights with adapters on, an odd number of columns in 4 bits,
            experts with `fp8`.
    """
    arguments.a_module(experts=experts)
    arguments.several_names(names)
    if getattr(getattr(experts, "config", None), "fp8", False):
        raise ValueError(
            "expected fp8=False for weights in few bits, which would be rounded twice, got True; "
            "build the layer without it"
        )
    for name in names:
        if experts._parameters.get(name) is None:
            held = (
                name for name, parameter in experts._parameters.items() if parameter is not None
            )
            raise ValueError(
                f"expected a parameter {name!r} to freeze, got {type(experts).__name__} with "
                f"{', '.join(held) or 'none'}; freeze before add_lora"
            )
    frozen = {name: FrozenWeight.of(experts.get_parameter(name), bits) for name in names}
    for name, weight in frozen.items():
        experts.register_parameter(name, nn.Parameter(weight, requires_grad=False))
