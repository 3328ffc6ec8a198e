"""Launches of the block-sparse products: tiles, memory orders, descriptors.

Letters: B = 128, C blocks stored, G matrices in a stack, M, N, K rows, columns and contraction.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mb_kernels.block_sparse.descriptors import dsd_tma_kernel, sdd_tma_kernel
from mb_kernels.block_sparse.pointers import dsd_kernel, sdd_kernel
from mb_kernels.block_sparse.reference import BLOCK, Topology, empty_stack
from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.descriptors import matrices
from mb_kernels.runtime.launch import cdiv, launch
from mb_kernels.runtime.plan import plan_of
from mb_kernels.targets.table import TILES, Tile

# Blocks in a row of S, on average, from which the stores of a tile weigh less than its loads.
_LONG_ROW = 8


def sdd(a: Tensor, b: Tensor, *topology: Tensor) -> Tensor:
    """Launch for stacks a [G, M/G, K] and b [G, K, N/G]: data [C, 128, 128]."""
    t = Topology(*(index.contiguous() for index in topology))
    a, b = _addressable(a), _addressable(b)
    data = a.new_empty((t.row_indices.numel(), BLOCK, BLOCK))
    if data.numel() == 0:
        return data
    indices = (t.row_indices, t.column_indices, t.block_offsets_t, t.offsets)
    block_rows = t.offsets.numel() - 1
    if all(_describable(x) for x in (a, b, data)):
        _sdd_tma(data, a, b, *indices, column_order=_column_order(t))
        return data
    _require_near(a, b)
    tile = _tile("sdd", a)
    launch(
        sdd_kernel,
        (data.shape[0] * (BLOCK // tile.block_m) * (BLOCK // tile.block_n),),
        *(a, b, data, *indices, block_rows, a.shape[2]),
        *(a.shape[1] // BLOCK, *a.stride()),
        *(b.shape[2] // BLOCK, *b.stride()),
        EVEN_K=a.shape[2] % tile.block_k == 0,
        COLUMN_ORDER=_column_order(t),
        **_tile_arguments(tile, a),
    )
    return data


def _sdd_tma(data: Tensor, a: Tensor, b: Tensor, *indices: Tensor, column_order: bool) -> None:
    tile = TILES["sdd"][plan_of(a).target.name]
    blocks, block_rows = data.shape[0], indices[-1].numel() - 1
    launch(
        sdd_tma_kernel,
        (min(blocks, plan_of(a).programs(blocks, tile)),),
        _described(a, BLOCK, tile.block_k),
        _described(b, tile.block_k, BLOCK),
        _described(data, BLOCK, BLOCK // 2),
        *(*indices, block_rows, blocks),
        *(a.shape[2], a.shape[1] // BLOCK, b.shape[2] // BLOCK),
        B=BLOCK,
        TK=tile.block_k,
        A_ROW_MAJOR=_row_major(a),
        B_ROW_MAJOR=_row_major(b),
        COLUMN_ORDER=column_order,
        PRECISION=plan_of(a).precision,
        **tile.launch_options,
    )


def dsd(data: Tensor, b: Tensor, *topology_and_layout: Any) -> Tensor:
    """Launch for data [C, 128, 128] and a stack b [G, K/G, N]; see ``block_sparse``'s op."""
    *topology, transposed, groups, column_major = topology_and_layout
    t = Topology(*(index.contiguous() for index in topology))
    data, b = data.contiguous(), _addressable(b)
    indices = (t.offsets, t.column_indices, t.block_offsets_t)
    if transposed:
        indices = (t.offsets_t, t.column_indices_t, t.block_offsets_t)
    block_rows = indices[0].numel() - 1
    out = empty_stack(b, groups, block_rows * BLOCK, b.shape[2], column_major)
    if out.numel() == 0:
        return out
    if all(_describable(x) for x in (data, b, out)):
        _dsd_tma(out, data, b, *indices, transposed=transposed)
        return out
    _require_near(b, out)
    tile = _tile("dsd", data)
    tiles = block_rows * (BLOCK // tile.block_m) * cdiv(b.shape[2], tile.block_n)
    launch(
        dsd_kernel,
        (min(tiles, plan_of(data).programs(tiles, tile)),),
        *(data, b, out, *indices, block_rows, b.shape[2]),
        *((1, BLOCK) if transposed else (BLOCK, 1)),
        *(b.shape[1] // BLOCK, *b.stride()),
        *(out.shape[1] // BLOCK, *out.stride()),
        EVEN_N=b.shape[2] % tile.block_n == 0,
        TRANSPOSED=transposed,
        **_tile_arguments(tile, data),
    )
    return out


def _dsd_tma(out: Tensor, data: Tensor, b: Tensor, *indices: Tensor, transposed: bool) -> None:
    block_rows = indices[0].numel() - 1
    long = data.shape[0] >= _LONG_ROW * block_rows
    tile = TILES["dsd" if long and _row_major(out) else "dsd_narrow"][plan_of(data).target.name]
    tiles = block_rows * cdiv(b.shape[2], tile.block_n)
    launch(
        dsd_tma_kernel,
        (min(tiles, plan_of(data).programs(tiles, tile)),),
        _described(data, *((tile.block_k, BLOCK) if transposed else (BLOCK, tile.block_k))),
        _described(b, tile.block_k, tile.block_n),
        _described(out, BLOCK, tile.block_n // 2),
        *(*indices, block_rows, b.shape[2], b.shape[1] // BLOCK, out.shape[1] // BLOCK),
        B=BLOCK,
        TN=tile.block_n,
        TK=tile.block_k,
        B_ROW_MAJOR=_row_major(b),
        TRANSPOSED=transposed,
        OUT_ROW_MAJOR=_row_major(out),
        PRECISION=plan_of(data).precision,
        **tile.launch_options,
    )


def _addressable(x: Tensor) -> Tensor:
    """x itself if each matrix of the stack is row- or column-major, else a copy that is."""
    require_countable("rows or columns of a dense matrix", max(x.shape))
    if 1 in x.stride()[1:] and 0 not in x.stride()[1:]:
        return x
    return x.contiguous()


def _require_near(*stacks: Tensor) -> None:
    """ValueError unless offsets within a tile, of at most 128 rows and columns, fit 32 bits."""
    for x in stacks:
        if max(x.stride()[1:]) >= 2**24:
            raise ValueError(
                "expected a dense matrix whose rows and columns lie fewer than 2**24 elements "
                f"apart; got {tuple(x.shape)} with strides {x.stride()}. Use the other memory "
                "order, x.mT.contiguous().mT, or split it."
            )


def _column_order(t: Topology) -> bool:
    """Whether columns of blocks are shorter than rows; measured 12 % on 4 experts of 16,384."""
    return t.offsets.numel() < t.offsets_t.numel()


def _row_major(x: Tensor) -> bool:
    return x.stride(2) == 1


def _describable(x: Tensor) -> bool:
    """Whether Hopper's tensor memory accelerator can load tiles of this stack."""
    if not plan_of(x).descriptors or x.numel() == 0:
        return False
    matrix, *others = x.stride()
    outer = others[0 if _row_major(x) else 1]  # beside a unit stride
    strides = (outer,) if x.shape[0] == 1 else (outer, matrix)
    return x.data_ptr() % 16 == 0 and all(s and s * x.element_size() % 16 == 0 for s in strides)


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor for boxes [rows, columns] of the matrices of a stack, unit stride last."""
    if _row_major(x):
        return matrices(x, (1, rows, columns))
    return matrices(x.transpose(1, 2), (1, columns, rows))


def _tile(op: str, x: Tensor) -> Tile:
    """The tile of the kernels that load through pointers."""
    plan = plan_of(x)
    target = plan.target.name
    if x.dtype is torch.float32:
        op += "_fp32"
    elif plan.descriptors:
        target = "sm80"  # an odd size or an odd address: rare
    return TILES[op][target]


def _tile_arguments(tile: Tile, x: Tensor) -> dict[str, Any]:
    return {
        "B": BLOCK,
        "TM": tile.block_m,
        "TN": tile.block_n,
        "TK": tile.block_k,
        "PRECISION": plan_of(x).precision,
        "XCDS": plan_of(x).target.xcds,
        **tile.launch_options,
    }
