"""Launches of the block-sparse products: tiles, memory orders, descriptors; and their gate cases.

Letters: B = 128, C blocks stored, G matrices in a stack, M, N, K rows, columns and contraction.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mb_kernels._block_sparse_kernels import dsd_kernel, sdd_kernel
from mb_kernels._launch import launch, precision, programs, uses_descriptors
from mb_kernels.reference.block_sparse import BLOCK, Topology
from mb_kernels.targets import TILES, GateCase, Target, Tile, current_target


def sdd(a: Tensor, b: Tensor, *topology: Tensor) -> Tensor:
    """Launch for stacks a [G, M/G, K] and b [G, K, N/G]: data [C, 128, 128]."""
    t = Topology(*topology)
    a, b = _addressable(a), _addressable(b)
    data = a.new_empty((t.row_indices.numel(), BLOCK, BLOCK))
    if data.numel() == 0:
        return data
    described = _describable(a) and _describable(b)
    tile = _tile("sdd", a, described)
    parts = (BLOCK // tile.block_m) * (BLOCK // tile.block_n)
    launch(
        sdd_kernel,
        (data.shape[0] * parts,),
        _described(a, tile.block_m, tile.block_k) if described else a,
        _described(b, tile.block_k, tile.block_n) if described else b,
        *(data, t.row_indices, t.column_indices, t.block_offsets_t, t.offsets[-1:], a.shape[2]),
        *(a.shape[1] // BLOCK, *a.stride()),
        *(b.shape[2] // BLOCK, *b.stride()),
        EVEN_K=a.shape[2] % tile.block_k == 0,
        COLUMN_ORDER=_column_order(t),
        A_ROW_MAJOR=_row_major(a),
        B_ROW_MAJOR=_row_major(b),
        **_tile_arguments(tile, a, described),
    )
    return data


def dsd(data: Tensor, b: Tensor, *topology_and_layout: Any) -> Tensor:
    """Launch for data [C, 128, 128] and a stack b [G, K/G, N]; see ``block_sparse``'s op."""
    *topology, transposed, groups, column_major = topology_and_layout
    t = Topology(*topology)
    data, b = data.contiguous(), _addressable(b)
    offsets = t.offsets_t if transposed else t.offsets
    out = empty_stack(b, groups, (offsets.numel() - 1) * BLOCK, b.shape[2], column_major)
    if out.numel() == 0:
        return out
    described = all(_describable(x) for x in (data, b, out))
    tile = _tile("dsd", data, described)
    s_block = (tile.block_k, tile.block_m) if transposed else (tile.block_m, tile.block_k)
    block_rows = offsets.numel() - 1
    tiles = block_rows * (BLOCK // tile.block_m) * triton.cdiv(b.shape[2], tile.block_n)
    launch(
        dsd_kernel,
        (min(tiles, programs(data, tile.programs_per_unit)),),
        _described(data, *s_block) if described else data,
        _described(b, tile.block_k, tile.block_n) if described else b,
        _described(out, tile.block_m, tile.block_n // 2) if described else out,
        *(offsets, t.column_indices_t if transposed else t.column_indices, t.block_offsets_t),
        *(block_rows, b.shape[2]),
        *((1, BLOCK) if transposed else (BLOCK, 1)),
        *(b.shape[1] // BLOCK, *b.stride()),
        *(out.shape[1] // BLOCK, *out.stride()),
        EVEN_N=b.shape[2] % tile.block_n == 0,
        B_ROW_MAJOR=_row_major(b),
        TRANSPOSED=transposed,
        OUT_ROW_MAJOR=_row_major(out),
        **_tile_arguments(tile, data, described),
    )
    return out


def empty_stack(like: Tensor, groups: int, rows: int, columns: int, column_major: bool) -> Tensor:
    """An uninitialised [groups, rows / groups, columns], each matrix row- or column-major."""
    if column_major:
        return like.new_empty((groups, columns, rows // groups)).transpose(1, 2)
    return like.new_empty((groups, rows // groups, columns))


def _addressable(x: Tensor) -> Tensor:
    """x itself if each matrix of the stack is row- or column-major, else a copy that is."""
    if 1 in x.stride()[1:] and 0 not in x.stride()[1:]:
        return x
    return x.contiguous()


def _column_order(t: Topology) -> bool:
    """Whether columns of blocks are shorter than rows; measured 12 % on 4 experts of 16,384."""
    return t.offsets.numel() < t.offsets_t.numel()


def _row_major(x: Tensor) -> bool:
    return x.stride(2) == 1


def _describable(x: Tensor) -> bool:
    """Whether Hopper's tensor memory accelerator can load tiles of this stack."""
    if not uses_descriptors(x) or x.numel() == 0:
        return False
    strides = [stride for stride in x.stride() if stride != 1]
    return x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in strides)


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor for boxes [rows, columns] of the matrices of a stack, unit stride last."""
    if _row_major(x):
        return TensorDescriptor.from_tensor(x, [1, rows, columns])
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, columns, rows])


def _tile(op: str, x: Tensor, described: bool) -> Tile:
    if x.dtype is torch.float32:
        op += "_fp32"
    elif not described and current_target(x.device).name == "sm90":
        return TILES[op]["sm80"]  # an odd size or an odd address: rare
    return TILES[op][current_target(x.device).name]


def _tile_arguments(tile: Tile, x: Tensor, described: bool) -> dict[str, Any]:
    return {
        "B": BLOCK,
        "TM": tile.block_m,
        "TN": tile.block_n,
        "TK": tile.block_k,
        "DESCRIPTORS": described,
        "PRECISION": precision(x),
        "XCDS": current_target(x.device).xcds,
        **tile.launch_options,
    }


def gate_cases(target: Target) -> list[GateCase]:
    """Both products in each memory order that a forward or backward meets, and once in fp32."""
    indices = {"row_indices_ptr": "*i32", "column_indices_ptr": "*i32", "used_ptr": "*i32"}
    indices["block_offsets_ptr"] = "*i32"
    # Row-major (a, b): x @ w1^T for w1 [E, F, D], dy @ w2 for w2 [E, D, F], and a transposed x.
    cases = [
        _case(f"sdd_{name}", sdd_kernel, target, indices, order)
        for name, order in {
            "forward": {"A_ROW_MAJOR": True, "B_ROW_MAJOR": False},
            "gradient": {"A_ROW_MAJOR": True, "B_ROW_MAJOR": True},
            "transposed": {"A_ROW_MAJOR": False, "B_ROW_MAJOR": True},
            "fp32": {"A_ROW_MAJOR": True, "B_ROW_MAJOR": False},
        }.items()
    ]
    indices = {"offsets_ptr": "*i32", "column_indices_ptr": "*i32", "block_offsets_ptr": "*i32"}
    # a @ w2^T; dh @ w1; dh^T @ x; and a^T @ dy, stored as w2's gradient.
    for name, transposed, row_major, unit in (
        ("forward", False, False, "stride_on"),
        ("input_gradient", False, True, "stride_on"),
        ("w1_gradient", True, True, "stride_on"),
        ("w2_gradient", True, True, "stride_om"),
        ("fp32", False, True, "stride_on"),
    ):
        order = {"TRANSPOSED": transposed, "B_ROW_MAJOR": row_major, unit: 1}
        order["OUT_ROW_MAJOR"] = unit == "stride_on"
        cases.append(_case(f"dsd_{name}", dsd_kernel, target, indices, order))
    return cases


def _case(
    name: str, kernel: Any, target: Target, indices: dict[str, str], order: dict[str, Any]
) -> GateCase:
    """A case on the target's tile, with descriptors where the launch would use them."""
    op, kind = name.split("_", 1)
    dtype = "fp32" if kind == "fp32" else "bf16"
    tile = TILES[name if dtype == "fp32" else op][target.name]
    described = target.name == "sm90" and dtype == "bf16"
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    constexprs: dict[str, Any] = {"B": BLOCK, "TM": m, "TN": n, "TK": k, "DESCRIPTORS": described}
    constexprs |= {
        "PRECISION": "ieee",
        "XCDS": target.xcds,
        **order,
    }
    b_box = (1, k, n) if order["B_ROW_MAJOR"] else (1, n, k)
    constexprs["stride_bn" if order["B_ROW_MAJOR"] else "stride_bk"] = 1
    if op == "sdd":
        s_name, s_box = "a_ptr", (1, m, k) if order["A_ROW_MAJOR"] else (1, k, m)
        constexprs |= {
            "EVEN_K": True,
            "COLUMN_ORDER": True,
            "stride_ak" if order["A_ROW_MAJOR"] else "stride_am": 1,
        }
    else:
        s_name, s_box = "data_ptr", (1, k, m) if order["TRANSPOSED"] else (1, m, k)
        constexprs |= {"EVEN_N": True, "stride_sm" if order["TRANSPOSED"] else "stride_sk": 1}
    signature = dict.fromkeys((s_name, "b_ptr"), f"*{dtype}")
    if described:
        signature = {s_name: _box_type(s_box), "b_ptr": _box_type(b_box)}
    if op == "sdd":
        signature["data_ptr"] = f"*{dtype}"
    else:
        out_box = (1, m, n // 2) if order["OUT_ROW_MAJOR"] else (1, n // 2, m)
        signature["out_ptr"] = _box_type(out_box) if described else f"*{dtype}"
    signature |= indices
    integers = [name for name in kernel.arg_names if name not in {*signature, *constexprs}]
    return GateCase(
        name=name,
        kernel=kernel,
        signature=signature | dict.fromkeys(integers, "i32"),
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options=tile.options,
        multiples_of_16=[name for name in integers if not name.endswith("blocks")],
        beyond_2gib=("b_ptr",),
        is_gemm=dtype == "bf16",  # fp32 products use no matrix unit on most targets
    )


def _box_type(shape: tuple[int, ...]) -> str:
    return f"tensordesc<bf16[{', '.join(map(str, shape))}]>"
