"""Gluon for the kernels: names that differ between releases, descriptors, what must be there.

Gluon is experimental: a name may move with any release. Compiled with Triton 3.6 to 3.9.
"""

import functools
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor

# The name from Triton 3.8 on, and the one before.
async_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

# Triton's names of torch's dtypes, where they differ.
_NAMES = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}

# ``reinterpret`` of shared memory, without the underscore from Triton 3.9 on.
OLD_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


def serves() -> bool:
    """Whether this Triton has every name of Gluon that the kernels use."""
    needed = {
        hopper: ("warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait"),
        hopper.mbarrier: ("MBarrierLayout", "init", "expect", "wait", "arrive"),
        gl: ("warp_specialize", "allocate_shared_memory", "NVMMASharedLayout",
             "NVMMADistributedLayout", "BlockedLayout", "SliceLayout", "static_range"),
    }  # fmt: skip
    return all(hasattr(module, name) for module, names in needed.items() for name in names)


def with_layout(plain: PlainDescriptor) -> TensorDescriptor:
    """The same descriptor with the layout its blocks have in shared memory."""
    descriptor = object.__new__(TensorDescriptor)  # unchecked, as in ``runtime.descriptors``
    descriptor.__dict__.update(plain.__dict__)
    dtype = str(plain.base.dtype).removeprefix("torch.")
    descriptor.layout = _layout(tuple(plain.block_shape), dtype)
    return descriptor


@functools.cache
def _layout(block: tuple[int, ...], dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, _NAMES.get(dtype, dtype)))
