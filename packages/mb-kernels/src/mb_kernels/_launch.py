"""What the host decides about a launch: tile, number of programs, how operands are loaded."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mb_kernels.targets import TILES, GateCase, Target, Tile, current_target


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launch a Triton kernel; its parameters are typed for the device, not for this call."""
    kernel[grid](*args, **kwargs)


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
    """Whether ``_hopper`` has the kernel: sm90 and no later, 16-bit operands."""
    return x.is_cuda and x.dtype is not torch.float32 and _is_hopper(x.device)


def wide(x: Tensor, tile: Tile) -> bool:
    """Whether rows of ``x`` are addressed by 64-bit pointers, see ``_schedule.token_rows``."""
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
        importlib.import_module("mb_kernels._hopper")
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
    """Descriptor of a stack of matrices [count, rows, columns], bounds-checked in each."""
    return TensorDescriptor(w, list(w.shape), list(w.stride()), list(block))


def precision(x: Tensor) -> str:
    """``input_precision`` of tl.dot: fp32 is exact unless torch allows TF32."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


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
