"""The GPU architectures the kernels are built for, and the tile sizes chosen for each.

Two things live here and nowhere else:

- `TARGETS`: what a kernel must respect on each architecture (wave size, shared memory, XCDs);
- `TILES`: the block sizes of every matrix-multiplying op per architecture, with the reason.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    name: as in `TARGETS`; backend: Triton's, "cuda" or "hip"; arch: Triton's, 90 or "gfx942";
    wave_size: threads of one warp or wavefront; shared_bytes: shared memory (LDS) one program may
    use; xcds: chiplets with an L2 cache of their own, over which programs are dealt round-robin;
    descriptors: operands pass through tensor descriptors (TMA); float8: the 8-bit floats with four
    significant bits that its matrix units multiply, or None.
    """

    name: str
    backend: str
    arch: int | str
    wave_size: int
    shared_bytes: int
    xcds: int = 1
    descriptors: bool = False
    float8: torch.dtype | None = None


# E4M3 as the Open Compute Project has it, up to 448; and MI300's, up to 240 and without a negative
# zero, whose code is NaN's. Neither has infinities.
_OCP, _FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            # A100; then RTX 40, L40 and, as a neighbour, RTX 30 (sm86); H100; B200; RTX 50.
            Target("sm80", "cuda", 80, 32, 166_912),
            Target("sm89", "cuda", 89, 32, 101_376, float8=_OCP),
            Target("sm90", "cuda", 90, 32, 232_448, descriptors=True, float8=_OCP),
            Target("sm100", "cuda", 100, 32, 232_448, descriptors=True, float8=_OCP),
            Target("sm120", "cuda", 120, 32, 101_376, float8=_OCP),
            # MI300; MI200; MI350; RX 7900; RX 7800 XT; RX 9070.
            Target("gfx942", "hip", "gfx942", 64, 65_536, xcds=8, float8=_FNUZ),
            Target("gfx90a", "hip", "gfx90a", 64, 65_536),
            Target("gfx950", "hip", "gfx950", 64, 163_840, xcds=8, float8=_OCP),
            Target("gfx1100", "hip", "gfx1100", 32, 65_536),
            Target("gfx1101", "hip", "gfx1101", 32, 65_536),
            Target("gfx1201", "hip", "gfx1201", 32, 65_536, float8=_OCP),
        )
    }
)


def current_target(device: torch.device | None = None) -> Target:
    """The entry of `TARGETS` that serves `device` (default: the current CUDA or ROCm device).

    An architecture without an entry of its own gets the nearest one: its kernels compile for the
    real chip all the same, only the tile sizes are the neighbour's. Without a GPU (Triton's CPU
    interpreter) it is sm80, whose kernels use no hardware-specific load.
    """
    if device is not None and device.type == "cpu":
        return TARGETS["sm80"]
    if torch.version.hip is not None:
        return _amd_target(torch.cuda.get_device_properties(device).gcnArchName)
    return _nvidia_target(*torch.cuda.get_device_capability(device))


def _nvidia_target(major: int, minor: int) -> Target:
    if major == 8:
        target = TARGETS["sm89" if minor in (6, 7, 9) else "sm80"]  # sm87 has more shared memory
        return target if minor == 9 else replace(target, float8=None)
    # sm103 and sm110 are as sm100; what comes after sm120 gets the tiles that ask for least.
    return TARGETS.get(f"sm{major}0", TARGETS["sm100" if major == 11 else "sm120"])


def _amd_target(arch_name: str) -> Target:
    arch = arch_name.split(":")[0]  # "gfx90a:sramecc+:xnack-"
    if arch in TARGETS:
        return TARGETS[arch]
    if arch.startswith("gfx94"):
        return TARGETS["gfx942"]
    if arch.startswith("gfx12"):
        return TARGETS["gfx1201"]
    return TARGETS["gfx90a" if arch.startswith("gfx9") else "gfx1100"]


@dataclass(frozen=True)
class Tile:
    """Block sizes of one matrix-multiplying kernel.

    A program computes block_m × block_n of the output, block_k at a time. group_m: how many rows
    of tiles share a column of tiles in L2. options: further compile options of the backend.
    Of a persistent kernel, programs_per_unit is how many programs are launched per compute unit,
    and flatten fuses its two loops, so that one tile's loads start during the epilogue before.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    programs_per_unit: int = 1
    flatten: bool = True

    @functools.cached_property
    def blocks(self) -> dict[str, Any]:
        """The constexpr arguments of a persistent kernel that follow from the tile."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "FLATTEN": self.flatten,
        }

    @functools.cached_property
    def launch_options(self) -> dict[str, Any]:
        """The keyword arguments of a kernel launch or compilation."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}


_CDNA, _RDNA = ("gfx90a", "gfx942", "gfx950"), ("gfx1100", "gfx1101", "gfx1201")
# 16x16 MFMA, the size Triton's own ragged matmul uses on CDNA3 and CDNA4.
_MFMA = {"matrix_instr_nonkdim": 16}
# Chips that take a neighbour's tiles, with which the gate finds nothing wrong on them either. Their
# matrix instructions are the neighbour's, but for gfx1201's.
NEIGHBOURS = {"sm89": "sm80", "sm120": "sm80", "gfx1101": "gfx1100", "gfx1201": "gfx1100"}
Shape = tuple[int, int, int]  # block_m, block_n, block_k


def _by_chip(
    shape: Shape | None, *, num_warps: int = 8, mfma: bool = True, **others: Shape | Tile
) -> dict[str, Tile]:
    """A tile for each chip: ``shape`` but for ``others``; None has tiles for these alone.

    Three stages on NVIDIA, two on AMD (three exceed the 64 KiB of LDS of all but gfx950). Of loops
    flattened for AMD Triton (3.6, 3.7) forgets which offsets are neighbours: the up-projection then
    loads tokens number by number, and all kernels take up to twice the LDS and more registers.
    """
    tiles = {}
    for name, target in TARGETS.items():
        known = NEIGHBOURS.get(name, name)
        tile = others.get(known, shape)
        if isinstance(tile, tuple):
            options = _MFMA if mfma and known in ("gfx942", "gfx950") else {}
            stages = 3 if target.backend == "cuda" else 2
            tile = Tile(*tile, num_warps=num_warps, num_stages=stages, options=options)
        if tile is not None:
            flatten = tile.flatten and target.backend == "cuda"
            tiles[name] = replace(tile, flatten=flatten)
    return tiles


def _attention(shape: tuple[int, int], **others: tuple[int, int]) -> dict[str, Tile]:
    """Tiles for whole heads in 4 warps: of 64 rows a warp has 16, the least there are."""
    tiles = {name: others.get(NEIGHBOURS.get(name, name), shape) for name in TARGETS}
    return {name: Tile(*tile, 128, num_warps=4, num_stages=2) for name, tile in tiles.items()}


# Two programs share an SM: 128 registers for each of 512 threads.
_TWO_PROGRAMS = Tile(
    *(128, 128, 64),
    num_warps=8,
    num_stages=3,
    options={"maxnreg": 128},
    programs_per_unit=2,
    flatten=False,
)

# Rows per expert up to which on Hopper down and dX load a step further ahead: weights then come
# from memory rather than L2. One H200, down and dX in ms, "down", "dx" against their "_few_rows":
# 0.170, 0.164 against 0.159, 0.160 at 256 rows; 0.405, 0.751 against 0.405, 0.745 at 512
# (Qwen3-30B, 8192 tokens); 0.475, 0.900 against 0.484, 0.913 at 1024 (OLMoE, 8192 tokens).
FEW_ROWS = 512

# Rows per expert, on average, up to which a forward only reads weights, as a decoder's of a few
# tokens: tiles of 16 rows, and so narrow that 8 experts keep every unit busy.
DECODED_ROWS = 8

# Why these. sm90 is measured, on one H200: python packages/mb-kernels/benchmarks/run.py kernels
# Of the others we have none. There a product of the expert MLP gets the first of 128 x 256 x 64,
# 128 x 128 x 64, 128 x 128 x 32 and 64 x 128 x 32 (half the columns in up_glu, whose accumulator
# holds two parts) that the gate finds without spills and within shared memory: the larger a tile,
# the less it reads. AMD's were found in flattened loops. In the present ones the first of these
# fits into gfx90a, gfx942 and gfx950 throughout; which is faster there nobody has measured.
TILES: dict[str, dict[str, Tile]] = {
    # Gather, up-projection, GLU: block_n gate columns and block_n up columns in one accumulator.
    "up_glu": _by_chip(
        (128, 64, 64), sm90=(128, 128, 64), sm100=(128, 128, 64), gfx1100=(64, 64, 32)
    ),
    # Both in Gluon, of tokens copied to their rows; block_n counts gate and up. In turns with
    # "up_glu", which gathers: 3.31 + 0.33 ms for the copy against 4.09 (OLMoE), 2.57 + 0.34 against
    # 3.13 (Qwen3-30B). Groups of 4, 16 and 32 row tiles: from 2% faster to 4% slower.
    "up_hopper": _by_chip(None, sm90=Tile(128, 256, 64, 8, 3, options={"maxnreg": 168})),
    # The same without GLU. sm90: two programs per SM hide the epilogue of a short contraction
    # (0.223 ms against 0.248 ms with 128 x 256; top-1, hidden 768, ffn 3072). gfx950: with 128
    # columns Triton 3.9 unrolls the twelve steps of a hidden size of 768, and spills 1652 bytes.
    "up": _by_chip(
        (128, 128, 64), sm90=_TWO_PROGRAMS, gfx950=(128, 256, 64), gfx1100=(64, 128, 32)
    ),
    # Backward of down-projection and activation; the epilogue holds more than the accumulator.
    # sm90: flattened it is 3 to 5% faster, but spills 8 bytes.
    "dact_glu": _by_chip(
        (128, 128, 64),
        sm90=Tile(128, 256, 64, num_warps=8, num_stages=3, flatten=False),
        gfx90a=(64, 128, 32),
        gfx1100=(64, 128, 32),
    ),
    # sm90: 0.277 ms against 0.310 ms with 128 x 256 (top-1, hidden 768, ffn 3072).
    "dact": _by_chip(
        (128, 128, 64), sm90=_TWO_PROGRAMS, gfx90a=(64, 128, 32), gfx1100=(64, 128, 32)
    ),
    # The same in Gluon, epilogue beside the next product (`expert_mlp.hopper`): 4 warps for it, and
    # three stages, which with the finished tile fill shared memory. Against the portable kernel:
    # 1.91 ms for 2.63 (OLMoE), 1.50 for 1.97 (Qwen3-30B), 3.04 for 3.74 (Mixtral), 0.243 for 0.301
    # (top-1; since then 0.249 to 0.218, in turns). 8 epilogue warps leave registers for half as
    # wide instructions: 2.11 ms (OLMoE). Groups of 1 to 16 row tiles alike, but for Mixtral's 3.31
    # ms in groups of 4 against 3.23 of 8.
    "dact_hopper": _by_chip(None, sm90=Tile(128, 256, 64, 8, 3, options={"maxnreg": 168})),
    # Rows times weights, weight [E, M, K], contraction contiguous in both operands: "down"; weight
    # [E, K, M]: "dx".
    **dict.fromkeys(
        ("down", "dx"),
        _by_chip(
            (128, 256, 64), sm80=(128, 128, 64), gfx90a=(128, 128, 64), gfx1100=(128, 128, 32)
        ),
    ),
    # The same for up to FEW_ROWS rows per expert on Hopper.
    **dict.fromkeys(
        ("down_few_rows", "dx_few_rows"),
        _by_chip(None, sm90=Tile(128, 256, 64, num_warps=8, num_stages=4, group_m=4)),
    ),
    # The same, and the up-projections, for up to DECODED_ROWS rows per expert. Not measured: on
    # sm90 and sm100 two programs with 64 KiB on their way keep memory busy.
    **{
        f"{op}_decode": _by_chip(
            (16, columns, 128),
            num_warps=4,
            sm90=Tile(16, columns, 128, 4, 5, programs_per_unit=2),
            sm100=Tile(16, columns, 128, 4, 5, programs_per_unit=2),
            gfx1100=(16, 32, 64),
        )
        for op, columns in (("up_glu", 32), ("up", 64), ("down", 64))
    },
    # Of 8-bit operands, where those above with twice the block_k spill: on sm100 112 bytes and 8.
    # On gfx942 and gfx950 none does. Neither was measured.
    "up_glu_fp8": _by_chip(None, sm100=(128, 64, 128)),
    **dict.fromkeys(("down_fp8", "dx_fp8"), _by_chip(None, sm100=(128, 128, 128))),
    # Weight gradients, contracted over ragged rows. sm90, of w2 and w1 at 256 rows per expert
    # (top-1, hidden 768, ffn 3072): 0.165, 0.167 ms; with three stages 0.186, 0.183.
    "outer": _by_chip(
        (128, 256, 64),
        sm90=Tile(128, 256, 64, num_warps=8, num_stages=4),
        gfx90a=(128, 128, 64),
        gfx950=(128, 128, 64),
        gfx1100=(128, 128, 32),
    ),
    # Symmetric products, in squares. sm90: Gram matrices of 64 of 768 x 3072 in 0.211 ms, of 256 of
    # 768 x 768 in 0.261 and, with what is added, in 0.278 (bmm: 0.300, 0.326, 0.521). Flattened
    # 0.207, 0.240 and 0.391, in 8 warps 0.213, 0.263 and 0.282; flattened with two stages 0.283,
    # 0.317 and 0.336, one program per SM 0.222 at the first.
    "symmetric": _by_chip(
        (128, 128, 64),
        sm80=(128, 128, 32),
        sm90=Tile(128, 128, 64, num_warps=4, num_stages=3, programs_per_unit=2, flatten=False),
        gfx90a=Tile(128, 128, 64, num_warps=8, num_stages=2, options=_MFMA),
        gfx1100=(64, 64, 32),
    ),
    # Attention with a bias by distance: block_m queries ("_dkv": keys) of a program, block_n of the
    # others at a step. "_dbias" wants squares. Not measured beside others: the largest of 64 x 64,
    # 64 x 32, 32 x 32 and 16 x 16 that do not spill; "_wide", heads of 65 to 128, is for all three.
    # A product over the columns of a head takes block_k at a time, 128 is a whole head: on gfx1100
    # 16 rows of 128 columns of four operands fill all 256 registers.
    "attention": _attention((64, 64), sm80=(64, 32))
    | {"sm120": Tile(64, 32, 128, num_warps=4, num_stages=1)}
    | dict.fromkeys(_RDNA, Tile(32, 32, 128, num_warps=4, num_stages=1)),
    "attention_dkv": _attention((64, 32), gfx1100=(16, 16))
    | dict.fromkeys(
        ("sm80", "sm89", "sm100", "sm120"), Tile(64, 32, 128, num_warps=4, num_stages=1)
    ),
    "attention_dbias": _attention((64, 64), gfx1100=(32, 32))
    | dict.fromkeys(("sm80", "sm89", "sm120"), Tile(64, 64, 128, num_warps=8, num_stages=2)),
    "attention_wide": _attention((32, 32))
    | dict.fromkeys(_RDNA, Tile(16, 16, 64, num_warps=8, num_stages=2)),
    # Without matrix units a thread holds the rows it multiplies, so heads are taken in parts where
    # whole ones of 128 spill: up to 16 bytes on sm80, sm89 and sm100, 2760 on gfx1100.
    "attention_fp32": dict.fromkeys(TARGETS, Tile(16, 16, 128, num_warps=4, num_stages=2))
    | dict.fromkeys(("sm80", "sm89"), Tile(16, 16, 64, num_warps=4, num_stages=2))
    | {"sm100": Tile(16, 16, 32, num_warps=4, num_stages=2)}
    | dict.fromkeys(_RDNA, Tile(16, 16, 32, num_warps=8, num_stages=2)),
    # The scan of a state space: block_m tokens of a chunk, elsewhere the largest of 64, 32 and 16
    # that do not spill. sm90, ms forward and backward (16,384 tokens, 64 heads of 64, states of
    # 128 x 64): 2.1; in 8 warps 3.7; of 32 tokens 3.1, of 128 in 8 warps 2.7. RDNA3 has none: of 16
    # tokens 180 bytes spill there.
    "state_space": dict.fromkeys(_CDNA, Tile(32, 64, 64, num_warps=4, num_stages=1))
    | {"sm90": Tile(64, 64, 64, num_warps=4, num_stages=2)}
    | {"sm100": Tile(64, 64, 64, num_warps=8, num_stages=1)}
    | dict.fromkeys(("sm80", "sm89", "gfx1201"), Tile(32, 64, 64, num_warps=8, num_stages=1))
    | {"sm120": Tile(16, 64, 64, num_warps=8, num_stages=1)},
    # fp32 without TF32 has no matrix units on NVIDIA: small tiles, registers hold the accumulator.
    # On gfx1100 64 x 32 x 32 spills up to 1344 bytes, 64 x 32 x 16 44, 32 x 32 x 32 with a bias 56.
    "fp32": dict.fromkeys(TARGETS, Tile(64, 32, 32, num_warps=4, num_stages=2))
    | dict.fromkeys(_CDNA, Tile(64, 32, 32, num_warps=4, num_stages=2, flatten=False))
    | dict.fromkeys(_RDNA, Tile(32, 32, 16, num_warps=4, num_stages=2, flatten=False)),
    # Block-sparse products. A tile is one 128 x 128 block of the sparse matrix or a part of it, so
    # block_m (and for sdd block_n) divide 128. sm90: persistent, the loads of a tile behind the
    # stores of the one before, two programs per SM. TFLOP/s of sdd at four shapes (46m, 125m, 356m,
    # olmoe): 615, 612, 527, 697; a program per block 490, 512, 489, 652; three programs with two
    # stages 565, 575, 462, 689; two blocks across in 8 warps 598, 596, 503, 680.
    "sdd": _by_chip(
        (128, 128, 64),
        mfma=False,
        sm80=(128, 128, 32),
        sm90=Tile(128, 128, 64, num_warps=4, num_stages=3, programs_per_unit=2),
        gfx1100=(128, 64, 32),
    ),
    "dsd": {
        name: tile if TARGETS[name].descriptors else replace(tile, programs_per_unit=2)
        for name, tile in _by_chip(
            (128, 128, 64),
            mfma=False,
            sm80=(128, 128, 32),
            sm90=Tile(128, 256, 64, num_warps=8, num_stages=4),
            sm100=(128, 256, 64),
            gfx1100=(128, 64, 32),
        ).items()
    },
    # The same where stores weigh more: short rows of S, or results in columns. In turns with "dsd",
    # TFLOP/s of x^T @ h at the four shapes: 590, 568, 410, 592; with "dsd" 512, 499, 348, 558.
    "dsd_narrow": _by_chip(
        None,
        sm90=Tile(128, 128, 64, num_warps=4, num_stages=3, programs_per_unit=2),
        sm100=(128, 128, 64),
    ),
    # fp32 products run on the ordinary units, which want registers more than reuse.
    "sdd_fp32": dict.fromkeys(TARGETS, Tile(128, 64, 16, num_warps=8, num_stages=2)),
    "dsd_fp32": dict.fromkeys(TARGETS, Tile(128, 64, 16, num_warps=8, num_stages=2))
    | dict.fromkeys(_RDNA, Tile(128, 32, 16, num_warps=8, num_stages=2)),
}
