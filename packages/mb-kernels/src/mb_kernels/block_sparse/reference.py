"""Reference of ``mb_kernels.block_sparse``: products of a block-sparse with a dense matrix.

A sparse matrix S is stored as in stk: ``data`` [C, 128, 128] holds its nonzero blocks row by row,
with COO indices, CSR offsets and the same for its transpose (``Topology``). C is how many blocks
have storage; ``offsets[-1]`` of them are in use, the rest stay zero. A dense operand whose rows
meet S may be a stack of matrices [G, rows / G, columns], which stands for one under the other: the
weights of G experts, in whatever memory order they have.

Letters: B = 128, C blocks stored, R and Q block rows and block columns, G matrices in a stack,
M, N, K rows, columns and contraction of a product.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mb_kernels.runtime.precision import wide_dtype

if TYPE_CHECKING:
    import stk

BLOCK = 128


class Topology(NamedTuple):
    """Where the blocks of a sparse matrix are; integer tensors, fields as in ``stk.Matrix``."""

    row_indices: Tensor
    """[C] block row of each block."""
    column_indices: Tensor
    """[C] block column of each block."""
    offsets: Tensor
    """[R + 1] block row r owns blocks offsets[r]:offsets[r + 1]."""
    offsets_t: Tensor
    """[Q + 1] the same for block columns, counting in column order."""
    column_indices_t: Tensor
    """[C] block row of each block, in column order."""
    block_offsets_t: Tensor
    """[C] which block of ``data`` each is, in column order."""


def sdd(a: Tensor, b: Tensor, topology: "stk.Matrix") -> "stk.Matrix":
    """Twin of ``mb_kernels.sdd``: the whole dense product, then its blocks."""
    left = a.flatten(0, -2)
    right = b if b.ndim == 2 else b.transpose(0, 1).flatten(1)
    product = left @ right
    if not topology.is_contiguous():
        product = product.t()
    t = topology_of(topology)
    rows, columns = _used(t)
    blocks = product.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    unused = product.new_zeros(t.row_indices.numel() - len(rows), BLOCK, BLOCK)
    return with_data(topology, torch.cat([blocks[rows, :, columns], unused]))


def dsd(a: "stk.Matrix", b: Tensor) -> Tensor:
    """Twin of ``mb_kernels.dsd``."""
    return to_dense(a) @ b.flatten(0, -2)


def dds(a: Tensor, b: "stk.Matrix") -> Tensor:
    """Twin of ``mb_kernels.dds``."""
    return a @ to_dense(b)


def to_dense(matrix: "stk.Matrix") -> Tensor:
    """The whole matrix, zeros included; differentiable in its data."""
    t = topology_of(matrix)
    rows, columns = _used(t)
    blocks = matrix.data.new_zeros(t.offsets.numel() - 1, t.offsets_t.numel() - 1, BLOCK, BLOCK)
    blocks = blocks.index_put((rows, columns), matrix.data[: len(rows)])
    dense = blocks.transpose(1, 2).flatten(2).flatten(0, 1)
    return dense if matrix.is_contiguous() else dense.t()


def topology_of(matrix: "stk.Matrix") -> Topology:
    """The index tensors of a Matrix, as stored: those of its transpose if it is transposed."""
    return Topology(
        matrix.row_indices,
        matrix.column_indices,
        matrix.offsets,
        matrix.offsets_t,
        matrix.column_indices_t,
        matrix.block_offsets_t,
    )


def make_matrix(size: tuple[int, int], data: Tensor, topology: Topology) -> "stk.Matrix":
    """An ``stk.Matrix`` of these blocks, without reading the device."""
    try:
        import stk
    except ImportError as missing:
        raise ImportError(
            "stk.Matrix, the container of block-sparse matrices, is not installed. "
            "Get it with: pip install 'mb-kernels[block-sparse]'"
        ) from missing
    t = topology
    indices = (t.row_indices, t.column_indices, t.offsets)
    transposed = (t.column_indices_t, t.offsets_t, t.block_offsets_t)
    return stk.Matrix(torch.Size(size), data, *indices, *transposed)


def stored_size(matrix: "stk.Matrix") -> tuple[int, int]:
    """Rows and columns as stored: those of the transpose if it is transposed."""
    rows, columns = matrix.size()
    return (rows, columns) if matrix.is_contiguous() else (columns, rows)


def with_data(matrix: "stk.Matrix", data: Tensor) -> "stk.Matrix":
    """A Matrix of the same topology, transposed likewise, with other blocks."""
    out = make_matrix(stored_size(matrix), data, topology_of(matrix))
    return out if matrix.is_contiguous() else out.t()


def sdd_blocks(a_GMK: Tensor, b_GKN: Tensor, topology: Topology) -> Tensor:
    """``data`` of the blocks of ``a @ b`` that the topology names; unused blocks are zero."""
    a_RBK = a_GMK.flatten(0, 1).unflatten(0, (-1, BLOCK))
    b_QKB = b_GKN.transpose(1, 2).flatten(0, 1).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    rows, columns = _used(topology)
    accumulator = wide_dtype(a_GMK)
    product = torch.bmm(a_RBK[rows].to(accumulator), b_QKB[columns].to(accumulator))
    unused = product.new_zeros(topology.row_indices.numel() - len(rows), BLOCK, BLOCK)
    return torch.cat([product, unused]).to(a_GMK.dtype)


def dsd_blocks(data: Tensor, b_GKN: Tensor, topology: Topology, transposed: bool) -> Tensor:
    """``S @ b`` [M, N], or ``S^T @ b``."""
    rows, columns = _used(topology)
    blocks = data[: len(rows)]
    out_blocks = topology.offsets.numel() - 1
    if transposed:
        rows, columns, blocks = columns, rows, blocks.transpose(1, 2)
        out_blocks = topology.offsets_t.numel() - 1
    accumulator = wide_dtype(data)
    b_QBN = b_GKN.flatten(0, 1).unflatten(0, (-1, BLOCK))
    products = torch.bmm(blocks.to(accumulator), b_QBN[columns].to(accumulator))
    out = products.new_zeros(out_blocks, BLOCK, b_GKN.shape[2]).index_add(0, rows, products)
    return out.flatten(0, 1).to(data.dtype)


def empty_stack(like: Tensor, groups: int, rows: int, columns: int, column_major: bool) -> Tensor:
    """An uninitialised [groups, rows / groups, columns], each matrix row- or column-major."""
    rows //= groups
    # No transposed view: autograd would not let the caller write into what an op returns.
    strides = (rows * columns, 1, rows) if column_major else (rows * columns, columns, 1)
    return like.new_empty_strided((groups, rows, columns), strides)


def _used(topology: Topology) -> tuple[Tensor, Tensor]:
    """Block rows and block columns of the blocks in use."""
    used = int(topology.offsets[-1])
    return topology.row_indices[:used].long(), topology.column_indices[:used].long()
