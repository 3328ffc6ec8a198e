"""A block that was swapped, kept without its weights for the way back.

Its parts are still found by their old names. What is written there, or frozen, would change
nothing, and nobody would notice: it is an error.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

EMPTY = (
    "expected a change, or requires_grad, of the weights of a swapped block's `.moe` "
    "(.moe.router, .moe.experts, .moe.shared_expert), got one of the block that was swapped, which "
    "is empty; or freeze what is to be frozen, and load what load_state_dict does not, before "
    "swap_blocks"
)


def emptied(block: nn.Module) -> nn.Module:
    """The block with its weights on the meta device."""
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, _Emptied.of(parameter))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                setattr(module, name, _Emptied.of(buffer))
        module._parameters = _Closed(module._parameters)
        module._buffers = _Closed(module._buffers)
    return block


def opened(block: nn.Module) -> nn.Module:
    """The block, ready to get weights."""
    for module in block.modules():
        module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
    return block


class _Closed(dict[str, Any]):
    """A module's parameters or buffers, in the place of which nobody would see others.

    `torch.func.functional_call` puts them there by the names of the state dict.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        raise ValueError(EMPTY)

    def __delitem__(self, name: str) -> None:
        raise ValueError(EMPTY)

    def __reduce__(self) -> tuple[type[_Closed], tuple[dict[str, Any]]]:
        return _Closed, (dict(self),)


class _Emptied(Tensor):
    """A weight or buffer that is the layer's now: by its old name it has a shape, no numbers."""

    _is_param: bool  # what makes a tensor of a subclass an nn.Parameter

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """As accelerate makes a loaded weight one of the class that lies at its name."""
        raise ValueError(EMPTY)

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        with torch.inference_mode(False):  # else no copy that is made outside could require one
            plain = tensor.detach().to("meta")
            empty: Any = Tensor._make_subclass(cls, plain, tensor.requires_grad)
        empty._is_param = isinstance(tensor, nn.Parameter)
        return empty

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _CHANGES.fullmatch(getattr(func, "__name__", "")):
            raise ValueError(EMPTY)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
            is_part = type(result) is Tensor and result.is_meta  # its `data`, say
            return result.as_subclass(cls) if is_part else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.of(self))

    def __reduce_ex__(self, proto: Any) -> Any:
        plain = torch.empty(self.shape, dtype=self.dtype, device="meta")
        is_parameter = isinstance(self, nn.Parameter)
        return _Emptied.of, (nn.Parameter(plain, self.requires_grad) if is_parameter else plain,)


# Names of functions that write: `copy_`, `requires_grad_`, `+=`, and what sets items or attributes.
_CHANGES = re.compile(r"(?!__)\w*[^_]_|__set(item)?__|__i(add|sub|mul|truediv|and|or|xor)__")
