"""Tensors as the layers compute with them: in which dtype, and plain where they are DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or as it is if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def cast_alike(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return x and the weights in the dtype to compute in: autocast's if it is on, else that of x.

    So fp32 master weights serve bf16 activations, and get fp32 gradients. Autocast leaves fp64 as
    it is, as in torch's own layers.
    """
    dtype = x.dtype
    wide = dtype == torch.float64
    if not (wide or x.is_meta) and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(t if t.dtype == dtype else t.to(dtype) for t in (x, *weights))


def without_autocast(x: Tensor, *, always: bool = False) -> AbstractContextManager[Any]:
    """A context in which x's device computes in the dtypes it is given.

    always: even if autocast is off now.
    """
    # The meta device has shapes alone, and autocast does not know it.
    if x.is_meta or not (always or torch.is_autocast_enabled(x.device.type)):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def to_plain(weight: Tensor, length: int) -> Tensor:
    """Return a weight as the plain tensor [length, ...] that this rank computes with.

    A DTensor of another length is sharded over the experts, of which this rank computes just its
    shard: it is unwrapped. Any other DTensor is gathered, and its gradient summed over the mesh:
    each rank brings its own tokens.
    """
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import Partial

    if weight.shape[0] != length:
        return weight.to_local()
    return weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)


def draw(weight: Tensor, init: Callable[[Tensor], Any]) -> None:
    """Let `init` fill a weight, of which a rank may hold a part: each part gets other numbers.

    Torch sees to that on GPUs alone. On CPUs the ranks' streams are equal, and so the numbers that
    each would draw for its part. There all are drawn, those of one process, and a part is kept.
    """
    if not (is_dtensor(weight) and weight.device.type == "cpu"):
        init(weight)
        return
    whole = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
    init(whole)
    for chunk in weight.__create_chunk_list__():  # as distributed checkpoints ask where a part lies
        begins = zip(chunk.offsets, chunk.sizes, strict=True)
        place = tuple(slice(begin, begin + size) for begin, size in begins)
        with torch.no_grad():
            weight.to_local().copy_(whole[place])


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether x is a tensor spread over a mesh."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    # Not imported: that takes as long as torch itself, and a DTensor is there only if it was.
    return isinstance(x, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))
