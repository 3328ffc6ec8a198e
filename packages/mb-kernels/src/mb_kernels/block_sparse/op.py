"""Products of a block-sparse and a dense matrix, on ``stk.Matrix`` with 128 × 128 blocks.

The three products of MegaBlocks (arXiv:2211.15841), named by the kinds of output and operands:

    sdd(a, b, topology)  sparse = dense @ dense, only the blocks the topology names
    dsd(a, b)            dense  = sparse @ dense
    dds(a, b)            dense  = dense @ sparse

Any topology, any transposes (``x.t()`` is free for dense and sparse operands), fp32, fp16, bf16,
forward and backward, deterministic. Index arithmetic is 64-bit, so rows are not limited to 32,768
as in stk's own kernels on today's Triton.

Two extensions serve Mixture-of-Experts weights. A dense operand whose rows (or, as the right
operand of sdd, columns) meet the sparse matrix may be a *stack* [G, ...]: the weights of G experts,
one under the other, in their own memory order, without a copy. And a Matrix may own more blocks
than its topology uses, ``offsets[-1]`` on the device, so that nothing waits for the host; blocks in
excess are zero.

Letters: G matrices in a stack, M, N, K rows, columns and contraction of a product, C blocks stored.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mb_kernels.block_sparse.reference import BLOCK as BLOCK
from mb_kernels.block_sparse.reference import (
    Topology,
    dsd_blocks,
    empty_stack,
    sdd_blocks,
    topology_of,
    with_data,
)
from mb_kernels.runtime import checks, registration

if TYPE_CHECKING:
    import stk


def sdd(a: Tensor, b: Tensor, topology: "stk.Matrix") -> "stk.Matrix":
    """The blocks of ``a @ b`` that ``topology`` names.

    Args:
        a: [M, K], or a stack [G, M / G, K]; fp32, fp16 or bf16; M a multiple of 128 (per matrix of
            the stack).
        b: [K, N], or a stack [G, K, N / G] whose matrices stand side by side; N likewise.
        topology: Matrix of size [M, N]; its data is not read. May be transposed.

    Returns:
        Matrix of size [M, N] with the topology's blocks and the dtype of ``a``. Differentiable in
        a and b through ``.data``.

    Raises:
        ValueError: sizes, dtypes, devices or the block size do not fit.
    """
    _check_matrix("topology", topology)
    checks.require_same("a", a, b=b)
    indices = _indices("topology", topology, "a", a)
    a_GMK, b_GKN = _stack("a", a), _stack("b", b)
    size = topology.size()
    _check_size("a", a_GMK.shape[0] * a_GMK.shape[1], size[0], "rows of the topology", a_GMK, 1)
    _check_size("b", b_GKN.shape[0] * b_GKN.shape[2], size[1], "columns of the topology", b_GKN, 2)
    _check_size("b", b_GKN.shape[1], a_GMK.shape[2], "columns of a")
    if not topology.is_contiguous():  # (a @ b)^T = b^T @ a^T has the blocks of the stored matrix
        a_GMK, b_GKN = b_GKN.transpose(1, 2), a_GMK.transpose(1, 2)
    data = torch.ops.mb.sdd(a_GMK, b_GKN, *indices)
    return with_data(topology, data)


def dsd(a: "stk.Matrix", b: Tensor) -> Tensor:
    """``a @ b`` for a sparse a.

    Args:
        a: Matrix of size [M, K]; fp32, fp16 or bf16. May be transposed.
        b: [K, N], or a stack [G, K / G, N] with K / G a multiple of 128.

    Returns:
        [M, N] in the dtype of ``a``; rows without blocks are zero. Differentiable in b and the data
        of a.

    Raises:
        ValueError: sizes, dtypes, devices or the block size do not fit.
    """
    _check_matrix("a", a)
    checks.require_same("a", a.data, b=b)
    indices = _indices("a", a, "a.data", a.data)
    b_GKN = _stack("b", b)
    _check_size("b", b_GKN.shape[0] * b_GKN.shape[1], a.size()[1], "columns of a", b_GKN, 1)
    transposed = not a.is_contiguous()
    return torch.ops.mb.dsd(a.data, b_GKN, *indices, transposed, 1, False)[0]


def dds(a: Tensor, b: "stk.Matrix") -> Tensor:
    """``a @ b`` for a sparse b.

    Args:
        a: [M, K]; fp32, fp16 or bf16.
        b: Matrix of size [K, N]. May be transposed.

    Returns:
        [M, N] in the dtype of ``a``. Differentiable in a and b's data.

    Raises:
        ValueError: sizes, dtypes, devices or the block size do not fit.
    """
    _check_matrix("b", b)
    checks.require_same("b", b.data, a=a)
    indices = _indices("b", b, "b.data", b.data)
    if a.ndim != 2:
        raise ValueError(f"a: expected [M, K]; got {tuple(a.shape)}. A stack has no use here.")
    _check_size("a", a.shape[1], b.size()[0], "rows of b")
    # a @ b = (b^T @ a^T)^T, computed into memory that is row-major after the last transpose.
    transposed = b.is_contiguous()
    out = torch.ops.mb.dsd(b.data, a.t()[None], *indices, transposed, 1, True)
    return out[0].t()


def _stack(name: str, x: Tensor) -> Tensor:
    if x.ndim not in (2, 3):
        raise ValueError(
            f"{name}: expected a matrix [rows, columns] or a stack [G, rows, columns]; got "
            f"{tuple(x.shape)}."
        )
    return x if x.ndim == 3 else x[None]


def _check_matrix(name: str, matrix: "stk.Matrix") -> None:
    if matrix.data.ndim != 3 or tuple(matrix.data.shape[1:]) != (BLOCK, BLOCK):
        raise ValueError(
            f"{name}: expected data of {BLOCK} x {BLOCK} blocks [C, {BLOCK}, {BLOCK}]; got "
            f"{tuple(matrix.data.shape)}. Block the matrix by {BLOCK}."
        )


def _check_size(
    name: str, got: int, expected: int, what: str, stack: Tensor | None = None, dim: int = 0
) -> None:
    if got != expected:
        raise ValueError(f"{name}: expected {expected}, the {what}; got {got}.")
    if stack is not None and stack.shape[dim] % BLOCK:
        raise ValueError(
            f"{name}: expected matrices in the stack whose size along the sparse matrix is a "
            f"multiple of {BLOCK}; got {stack.shape[dim]}. Pad them with zeros."
        )


def _indices(name: str, matrix: "stk.Matrix", what: str, x: Tensor) -> Topology:
    """Where the blocks are; what kernels count blocks by in int32, whatever it is given in."""
    indices = topology_of(matrix)
    named = {f"{name}.{field}": t for field, t in indices._asdict().items()}
    checks.require_device(what, x, **named)
    for field, t in named.items():
        if t.dtype not in (torch.int16, torch.int32, torch.int64):  # stk's are of 16 bits
            raise ValueError(f"{field}: expected int16, int32 or int64; got {t.dtype}.")
    counts = ("offsets", "offsets_t", "block_offsets_t")
    counted = checks.int32(*(getattr(indices, field) for field in counts))
    return indices._replace(**dict(zip(counts, counted, strict=True)))


def _debug_topology(t: Topology) -> None:
    """Under ``MB_DEBUG=1``: ValueError unless every block in use is stored, and in the matrix."""
    stored, used = t.row_indices.shape[0], int(t.offsets[-1])
    for name in ("offsets", "offsets_t"):
        ends = getattr(t, name).tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] != used or used > stored:
            raise ValueError(
                f"{name}: expected to start at 0, never to fall, and to end where offsets does, at "
                f"most at {stored}, the blocks that are stored; got {ends}. "
                "Make the Matrix's offsets and indices together."
            )
    rows, columns = t.offsets.shape[0] - 1, t.offsets_t.shape[0] - 1
    for name, count in (
        ("row_indices", rows),
        ("column_indices", columns),
        ("column_indices_t", rows),
        ("block_offsets_t", stored),
    ):
        indices = getattr(t, name)[:used]
        wrong = indices[(indices < 0) | (indices >= count)]
        if wrong.numel():
            raise ValueError(
                f"{name}: expected 0 to {count - 1} for the {used} blocks in use; got "
                f"{wrong[0].item()}. Make the Matrix's offsets and indices together."
            )


def _column_major(x_GMN: Tensor) -> bool:
    return x_GMN.stride(1) == 1 and x_GMN.stride(2) != 1


def _sdd_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sdd_backward(ctx: Any, d_data: Tensor) -> tuple[Tensor | None, ...]:
    a_GMK, b_GKN, *topology = ctx.saved_tensors
    b_GNK = b_GKN.transpose(1, 2)
    da = db = None
    if ctx.needs_input_grad[0]:
        layout = (False, a_GMK.shape[0], _column_major(a_GMK))
        da = torch.ops.mb.dsd(d_data, b_GNK, *topology, *layout)
    if ctx.needs_input_grad[1]:
        layout = (True, b_GNK.shape[0], _column_major(b_GNK))
        db = torch.ops.mb.dsd(d_data, a_GMK, *topology, *layout).transpose(1, 2)
    return da, db, *[None] * 6


def _dsd_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    data, b_GKN, *topology, ctx.transposed, _, _ = inputs
    ctx.save_for_backward(data, b_GKN, *topology)


def _dsd_backward(ctx: Any, dy_GMN: Tensor) -> tuple[Tensor | None, ...]:
    data, b_GKN, *topology = ctx.saved_tensors
    d_data = db = None
    if ctx.needs_input_grad[0]:
        left, right = (b_GKN, dy_GMN) if ctx.transposed else (dy_GMN, b_GKN)
        d_data = torch.ops.mb.sdd(left, right.transpose(1, 2), *topology)
    if ctx.needs_input_grad[1]:
        layout = (not ctx.transposed, b_GKN.shape[0], _column_major(b_GKN))
        db = torch.ops.mb.dsd(data, dy_GMN, *topology, *layout)
    return d_data, db, *[None] * 9


def _dsd_reference(data: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *topology, transposed, groups, column_major = rest
    product = dsd_blocks(data, b, Topology(*topology), transposed)
    out = empty_stack(b, groups, *product.shape, column_major)
    return out.copy_(product.view(out.shape))


def _dsd_fake(data: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *topology, transposed, groups, column_major = rest
    t = Topology(*topology)
    rows = ((t.offsets_t if transposed else t.offsets).shape[0] - 1) * BLOCK
    return empty_stack(b, groups, rows, b.shape[2], column_major)


def _sdd_flops(
    a_shape: Any, b_shape: Any, row_indices_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return 2 * row_indices_shape[0] * BLOCK * BLOCK * a_shape[2]


def _dsd_flops(data_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * data_shape[0] * BLOCK * BLOCK * b_shape[2]


_TOPOLOGY = (
    "Tensor row_indices, Tensor column_indices, Tensor offsets, Tensor offsets_t, "
    "Tensor column_indices_t, Tensor block_offsets_t"
)
registration.register(
    f"sdd(Tensor a, Tensor b, {_TOPOLOGY}) -> Tensor",
    reference=lambda a, b, *topology: sdd_blocks(a, b, Topology(*topology)),
    kernels="mb_kernels.block_sparse.kernels",
    fake=lambda a, b, row_indices, *_: a.new_empty((row_indices.shape[0], BLOCK, BLOCK)),
    flops=_sdd_flops,
    setup_context=_sdd_setup,
    backward=_sdd_backward,
    differentiable_twice=True,
    strided=True,
    debug_check=lambda a, b, *topology: _debug_topology(Topology(*topology)),
)
registration.register(
    f"dsd(Tensor data, Tensor b, {_TOPOLOGY}, bool transposed, int groups, bool column_major) "
    "-> Tensor",
    reference=_dsd_reference,
    kernels="mb_kernels.block_sparse.kernels",
    fake=_dsd_fake,
    flops=_dsd_flops,
    setup_context=_dsd_setup,
    backward=_dsd_backward,
    differentiable_twice=True,
    strided=True,
    debug_check=lambda data, b, *topology: _debug_topology(Topology(*topology[:6])),
)
