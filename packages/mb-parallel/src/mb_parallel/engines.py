"""Torch's release; whether something is a DTensor or sharded by FSDP2, without importing either.

Importing DTensor or FSDP2 takes a second or two, since they import SymPy and much of the compiler,
and one process needs neither. So no module of this package imports them at its top. Functions that
shard something import what they need; all others ask here. This works because a DTensor exists only
if its module was imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from mb_layers.tensors import is_dtensor as is_dtensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def is_fsdp(module: Any) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 shards this module."""
    return isinstance(module, _classes("torch.distributed.fsdp", "FSDPModule"))


def is_wrapper(module: Any) -> bool:
    """Whether this is torch's DistributedDataParallel, or FSDP1, around a module."""
    fsdp1 = _classes("torch.distributed.fsdp", "FullyShardedDataParallel")
    return isinstance(module, (DistributedDataParallel, fsdp1))


def is_compiled(module: Any) -> bool:
    """Whether this is what `torch.compile` returned for a module."""
    return isinstance(module, _classes("torch._dynamo.eval_frame", "OptimizedModule"))


def torch_release() -> tuple[int, int]:
    """Torch's major and minor number."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_compiled_in_place(module: Any) -> bool:
    """Whether a module's own `compile` was called, which wraps nothing."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_under_way(tensor: Any) -> bool:
    """Whether a collective is still to write this tensor."""
    module = "torch.distributed._functional_collectives"
    return isinstance(tensor, _classes(module, "AsyncCollectiveTensor"))


def _classes(module: str, name: str) -> Any:
    """A class of a module that was imported, else none: `()` for `isinstance`."""
    return getattr(sys.modules.get(module), name, ())
