"""``Plan``: how kernels run on one device in one dtype.

All that depends on the chip is in the fields of a plan. Tests and the compile gate replace it by
another one with ``assume``.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mb_kernels.targets.table import TARGETS, TILES, Target, Tile, current_target

# Small, so that the interpreter's small tensors still span several tiles.
INTERPRETER_TILE = Tile(32, 32, 32, num_warps=4, num_stages=2, group_m=3)


@dataclass(frozen=True)
class Plan:
    """What the host decides about launches apart from their sizes.

    target: the chip, or the most similar one in ``TARGETS``; units: its compute units, over which
    persistent programs are distributed; descriptors: operands are loaded through tensor descriptors
    (TMA); specialized: the expert MLP runs the Gluon kernels, in which some warps do nothing but
    the epilogue, see ``expert_mlp.hopper``; interpreted: on the CPU by Triton's interpreter;
    tiles_per_program: see ``programs``; free_units: what the chip has beside ``units``, left to
    others' kernels.
    """

    target: Target
    dtype: torch.dtype
    units: int
    descriptors: bool
    specialized: bool
    interpreted: bool = False
    tiles_per_program: int | None = None
    free_units: int = 0

    @property
    def float8(self) -> bool:
        """Whether operands are codes of ``mb_kernels.to_float8``."""
        return self.dtype is self.codes

    @property
    def codes(self) -> torch.dtype:
        """What ``mb_kernels.to_float8`` rounds to: the chip's 8-bit floats, else OCP's."""
        return self.target.float8 or torch.float8_e4m3fn

    @property
    def parts(self) -> int:
        """Into how many parts a sum is cut: the same, whatever is left free, for the same bits."""
        return self.units + self.free_units

    def tile(self, op: str) -> Tile:
        """The tile of ``op``, a key of ``TILES``."""
        if self.interpreted and not op.endswith("_hopper"):
            low = op.endswith("_decode")
            return replace(INTERPRETER_TILE, block_m=16) if low else INTERPRETER_TILE
        if self.float8:
            own = TILES.get(f"{op}_fp8", {}).get(self.target.name)
            return own or _doubled(TILES[op][self.target.name])
        return TILES["fp32" if self.dtype is torch.float32 else op][self.target.name]

    def has(self, op: str) -> bool:
        """Whether the chip has a tile for ``op`` in this dtype."""
        return self.dtype is not torch.float32 and self.target.name in TILES.get(op, {})

    def programs(self, items: int, tile: Tile) -> int:
        """How many programs a persistent kernel of at most ``items`` tiles is launched with.

        Item i belongs to program i modulo this number. As many programs as the chip holds at once
        share the items evenly. But if another kernel, a collective's say, occupies some units, the
        programs meant for these start only when others have ended, and the kernel takes twice as
        long. With ``tiles_per_program`` there are several times as many programs, and each ends
        after at most so many tiles; the hardware then starts the next one in its place.
        """
        at_once = self.units * tile.programs_per_unit
        if self.tiles_per_program is None:
            return at_once
        return at_once * max(-(-items // (at_once * self.tiles_per_program)), 1)

    @property
    def xcds(self) -> int:
        """Chiplets with an L2 of their own, if the programs divide evenly among them."""
        return self.target.xcds if self.units % self.target.xcds == 0 else 1

    @property
    def ptx(self) -> bool:
        """Whether kernels may hold PTX instructions that the portable operations do not reach."""
        return self.target.backend == "cuda" and not self.interpreted

    @property
    def precision(self) -> str:
        """``input_precision`` of tl.dot: fp32 is exact unless torch allows TF32.

        torch's older switches write this attribute too, but cannot be read instead: they raise
        once the attribute itself has been set.
        """
        if self.dtype is not torch.float32:
            return "ieee"
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"

    def wide(self, x: Tensor, tile: Tile) -> bool:
        """Whether rows of ``x`` are addressed by 64-bit pointers, see ``memory.token_rows``."""
        return x.numel() >= 2**31 or (tile.flatten and self.target.backend == "cuda")


def _doubled(tile: Tile) -> Tile:
    """The tile for 8-bit operands: as many bytes of them at a step."""
    return replace(tile, block_k=2 * tile.block_k)


# A thread has a value of its own: another one may launch kernels while a model is set up in this.
_assumed: ContextVar[Callable[[torch.dtype], Plan] | None] = ContextVar("assumed", default=None)


def plan_of(x: Tensor) -> Plan:
    """The plan for the device and dtype of ``x``."""
    assumed = _assumed.get()
    return plan_on(x.device, x.dtype) if assumed is None else assumed(x.dtype)


@contextlib.contextmanager
def assume(plan: Callable[[torch.dtype], Plan]) -> Generator[None]:
    """Within: this thread's plan of a dtype, whatever device a tensor is on.

    For rehearsals, tests and the gate. Autograd runs a GPU's backward pass in a thread of its own.
    """
    outer = _assumed.set(plan)
    try:
        yield
    finally:
        _assumed.reset(outer)


@functools.cache
def plan_on(device: torch.device, dtype: torch.dtype) -> Plan:
    """The plan for a device, whatever is assumed."""
    if device.type != "cuda":
        return Plan(TARGETS["sm80"], dtype, 3, False, False, interpreted=True)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    # A persistent kernel whose last program waits for a multiprocessor that a collective holds
    # takes twice as long, or as long as the collective waits for its peer.
    free = min(_number("MB_FREE_SMS"), units - 1)
    plan = plan_for(current_target(device), dtype, units - free, _hopper(device))
    tiles = _number("MB_TILES_PER_PROGRAM")
    return replace(plan, tiles_per_program=tiles or None, free_units=free)


def _number(variable: str) -> int:
    """What a variable of the environment says, 0 if it is not set."""
    value = os.environ.get(variable, "") or "0"
    if not value.isdecimal():
        raise ValueError(
            f"{variable}: expected a whole number from 0 on; got {value!r}. Set it to one, or to "
            "nothing."
        )
    return int(value)


def plan_for(target: Target, dtype: torch.dtype, units: int, hopper: bool) -> Plan:
    """The plan for a chip; ``hopper``: it is a Hopper, and its Gluon kernels can be compiled."""
    wide_enough = dtype is not torch.float32
    return Plan(target, dtype, units, wide_enough and target.descriptors, wide_enough and hopper)


def _hopper(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return gluon_serves()


@functools.cache
def gluon_serves() -> bool:
    """Whether Gluon, which is experimental, has what ``runtime.gluon`` expects."""
    try:
        from mb_kernels.runtime import gluon

        return gluon.serves()
    except (ImportError, AttributeError):
        return False
