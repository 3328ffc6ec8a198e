"""What the host decides about a launch: tile, number of programs, how operands are loaded."""

import functools
import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from mb_kernels.runtime import registration
from mb_kernels.targets.table import TILES, GateCase, Target, Tile, current_target


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; ``triton.cdiv`` serves kernels too, and takes 1.9 us against 0.1."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two from n >= 1 on, as ``triton.next_power_of_2``."""
    return 1 << (n - 1).bit_length()


def triton_version() -> tuple[int, int]:
    """(3, 6) for 3.6.0."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


# What Triton compiled, by all that it compiles for, with the kernel's globals as they were then.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
# Of these releases the private call below is known, and tested. MB_DIRECT_LAUNCH=0 turns it off. On
# AMD the size of a storage counts too, and interpreted nothing is compiled.
_KNOWN_TRITON = ((3, 6), (3, 9))
_direct = (
    os.environ.get("MB_DIRECT_LAUNCH") != "0"
    and torch.version.hip is None
    and not registration.interpret
    and _KNOWN_TRITON[0] <= triton_version() <= _KNOWN_TRITON[1]
)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel: the device's arguments by position, constexprs and options by name.

    ``kernel[grid]`` finds out anew at each launch what is to run, asks the driver about each tensor
    and calls its chains of hooks. Here what is to run is looked up by what a kernel is compiled for
    and tensors are passed as their addresses: 5 and 6 us less of 26 (hosts of an H200).
    """
    known = _specialize(kernel, args, constants) if _direct and not _watched(kernel) else None
    if known is None:
        kernel[grid](*args, **constants)
        return
    device, key, addresses = known
    kept = _compiled.get(key)
    if kept is None:
        assert not any(isinstance(value, Tensor) for value in constants.values())
        compiled = kernel[grid](*args, **constants)
        captured = tuple((names, n, names.get(n)) for (n, _), (_, names) in _globals(kernel))
        values = tuple(constants[n] for n in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, values, captured
        return
    compiled, values, captured = kept
    for names, name, value in captured:
        if names.get(name) is not value:  # Triton has something to say about it
            kernel[grid](*args, **constants)
            return
    active: Any = driver.active
    try:
        compiled.run(
            *(*grid, 1, 1)[:3],
            active.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,  # what hooks would be told, and no hooks
            None,
            None,
            *addresses,
            *values,
        )
    except (TypeError, AttributeError) as changed:  # raised before anything is launched
        _give_up(changed)
        kernel[grid](*args, **constants)


def _give_up(changed: Exception) -> None:
    """Leave all launches to Triton from now on: its private call is not the one known here."""
    global _direct
    _direct = False
    warnings.warn(
        f"mb_kernels launches through Triton's public call from here on, some 10 us slower: with "
        f"Triton {triton.__version__} the private one failed ({changed}). MB_DIRECT_LAUNCH=0 has "
        "it so from the start.",
        stacklevel=3,
    )


def _globals(kernel: Any) -> Any:
    return kernel.used_global_vals.items()


def _watched(kernel: Any) -> bool:
    """Whether somebody wants to see launches, or the stages of a compilation.

    A profiler has hooks in Triton's chains of them, or in their place.
    """
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.add_stages_inspection_hook
    )


def _specialize(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[int, tuple[Any, ...], list[Any]] | None:
    """Device, what Triton compiles for, and the arguments with addresses for tensors.

    A tensor counts with its dtype, a descriptor with dtype and block, an integer with being 1, a
    multiple of 16, or beyond 32 bits. None where that is not all: an unaligned tensor, an argument
    of another kind.
    """
    device = -1
    key = [kernel.fn, knobs.runtime.debug, knobs.compilation.instrumentation_mode]
    key += [*constants, *constants.values()]
    addresses: list[Any] = []
    for a in args:
        kind = type(a)
        given = a
        if kind is int:
            key.append((a == 1) + 2 * (a % 16 == 0) + 4 * (-(2**31) <= a < 2**31))
        elif a is None or kind is float:
            key.append(kind)
        elif isinstance(a, Tensor):
            device, given = a.get_device(), a.data_ptr()
            if given % 16:
                return None
            key.append(a.dtype)
        elif hasattr(a, "block_shape"):  # a descriptor, Gluon's layout following from these two
            device = a.base.get_device()
            key.append((a.base.dtype, *a.block_shape))
        else:
            return None
        addresses.append(given)
    key.append(device)
    return device, tuple(key), addresses


def tile_of(op: str, x: Tensor) -> Tile:
    """The tile of ``op`` for the device and dtype of ``x``."""
    if not x.is_cuda:
        return INTERPRETER_TILE
    return TILES["fp32" if x.dtype is torch.float32 else op][_target(x.device).name]


# Small, so that the interpreter's small tensors still span several tiles.
INTERPRETER_TILE = Tile(32, 32, 32, num_warps=4, num_stages=2, group_m=3)


def uses_descriptors(x: Tensor) -> bool:
    """Whether operands are loaded through tensor descriptors (TMA)."""
    return x.is_cuda and x.dtype is not torch.float32 and _target(x.device).name == "sm90"


def uses_hopper_kernels(x: Tensor) -> bool:
    """Whether ``expert_mlp.hopper`` has the kernel: sm90 and no later, 16-bit operands."""
    return x.is_cuda and x.dtype is not torch.float32 and _is_hopper(x.device)


def wide(x: Tensor, tile: Tile) -> bool:
    """Whether rows of ``x`` are addressed by 64-bit pointers, see ``memory.token_rows``."""
    return x.numel() >= 2**31 or (tile.flatten and torch.version.hip is None)


def ptx(x: Tensor) -> bool:
    """Whether kernels may hold PTX instructions that the portable operations do not reach."""
    return x.is_cuda and torch.version.hip is None


def programs(x: Tensor, per_unit: int = 1) -> int:
    """How many programs a persistent kernel is launched with."""
    return _units(x.device) * per_unit if x.is_cuda else 3


@functools.cache
def _target(device: torch.device) -> Target:
    return current_target(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        importlib.import_module("mb_kernels.expert_mlp.hopper.core")
    except ImportError:  # Gluon is experimental: without the names it needs, the portable kernels
        return False
    return True


@functools.cache
def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def xcds(x: Tensor) -> int:
    """Chiplets with an L2 of their own, if the programs divide evenly among them."""
    if not x.is_cuda:
        return 1
    count = _target(x.device).xcds
    return count if programs(x) % count == 0 else 1


def operand(x: Tensor) -> Tensor:
    """``x``, or a copy if it is not contiguous or not aligned as 16-byte loads need."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def matrices(w: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Descriptor of a stack of matrices [count, rows, columns], bounds-checked in each.

    The stride of a dimension of one element may be any number, and the hardware looks at it.
    """
    count, rows, columns = w.shape
    strides = [
        w.stride(0) if count > 1 else rows * columns,
        w.stride(1) if rows > 1 else columns,
        1,
    ]
    return _descriptor(w, [count, rows, columns], strides, list(block))


def ragged(x: Tensor, block: Sequence[int], parts: int | None = None) -> TensorDescriptor:
    """``create_ragged_descriptor`` of x [N, columns], or of x as [N, parts, columns / parts].

    The same descriptor, from numbers instead of views of x.
    """
    columns = x.shape[1]
    tail = [columns] if parts is None else [parts, columns // parts]
    strides = [columns, 1] if parts is None else [columns, columns // parts, 1]
    return _descriptor(
        x,
        [0x7FFF0000, 0x7FFF0000, 0x40000000, *tail],
        [2**34 - columns, columns, *strides],
        [1, 1, *block],
    )


def _descriptor(
    base: Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    """A TensorDescriptor without its checks, which take the host twice as long as the rest.

    ``operand`` and sizes that are multiples of 16 see to what they ask; the driver asks again.
    """
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base = base
    descriptor.shape = shape
    descriptor.strides = strides
    descriptor.block_shape = block
    return descriptor


def precision(x: Tensor) -> str:
    """``input_precision`` of tl.dot: fp32 is exact unless torch allows TF32.

    The attribute is the one that torch's older switches write too; their getters raise once it has
    been set by name.
    """
    allowed = x.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def matrix_case(
    name: str,
    kernel: Any,
    target: Target,
    op: str,
    *,
    pointers: dict[str, str],
    constexprs: dict[str, Any],
    operands: dict[str, Sequence[int]],
    integers: Sequence[str] = (),
) -> GateCase:
    """A gate case of a persistent kernel in bf16 with the tile of ``op``.

    operands: those loaded through descriptors where the target has them, with their block shape.
    """
    tile = TILES[op][target.name]
    descriptors = target.name == "sm90"
    blocks = {
        n: f"tensordesc<bf16[{', '.join(map(str, shape))}]>" if descriptors else "*bf16"
        for n, shape in operands.items()
    }
    return GateCase(
        name=name,
        kernel=kernel,
        signature={**pointers, **blocks, **dict.fromkeys(integers, "i32")},
        constexprs={
            **constexprs,
            **tile.blocks,
            "DESCRIPTORS": descriptors,
            "PRECISION": "ieee",
            "XCDS": target.xcds,
        },
        is_gemm=True,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options=tile.options,
    )
