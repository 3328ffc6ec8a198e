"""The expert MLP as block-sparse products: MegaBlocks' own formulation (arXiv:2211.15841).

Every expert's rows are padded to a multiple of 128, so that the intermediate of all experts is one
block-sparse matrix [rows, E·F] with dense blocks on a ragged diagonal: sdd computes it, the
activation acts on its blocks, dsd brings it back. The same experts, parameters and results as
``expert_mlp``, whose fused kernels are the faster route; this one is for comparison, and for those
who want to put their own sparse operations in between.

The number of padded rows depends on the routing, but has a bound that depends on sizes alone.
Tensors have the size of the bound, and only the device knows how much of them is used. So the host
never waits.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N = T·K rows, R padded rows.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mb_kernels.activation import parse
from mb_kernels.bins import Bins
from mb_kernels.block_sparse.mlp_reference import (
    empty_topology,
    make_pattern,
    pad_indices,
    padded_rows,
    topology_indices,
)
from mb_kernels.block_sparse.reference import BLOCK, Topology
from mb_kernels.elementwise import op as elementwise  # noqa: F401  (registers the activation)
from mb_kernels.expert_mlp.arguments import check_experts
from mb_kernels.exporting import is_exporting
from mb_kernels.recomputing import recomputed
from mb_kernels.runtime import checks, registration

if TYPE_CHECKING:
    import stk


def pad_bins(bins: Bins) -> Bins:
    """The same routing with every expert's rows filled up to a multiple of 128.

    Args:
        bins: of N slots.

    Returns:
        Bins whose order has R = ``padded_rows(N, E)`` entries, -1 for padding; inverse and offsets
        count padded rows. As ever, rows from offsets[-1] on hold the dropped slots.

    Raises:
        ValueError: bins that are padded already, or on several devices, or of no integers; on a
            CPU, or with ``MB_DEBUG=1``, offsets that divide no rows.
    """
    checks.require_bins("bins.order_N", None, bins)
    slots = bins.inverse_N.numel()
    if bins.order_N.numel() != slots:
        raise ValueError(
            f"bins: expected a row for each of {slots} slots, as bin_tokens returns them; got "
            f"{bins.order_N.numel()} rows. Pass bins that are not padded."
        )
    rows = padded_rows(slots, bins.offsets_E1.numel() - 1)
    indices = checks.int32(bins.order_N, bins.inverse_N, bins.offsets_E1)
    order, inverse, offsets = torch.ops.mb.pad_indices(*indices, rows)
    return Bins(order, inverse, bins.tokens_per_expert_E, offsets)


def topology(padded_bins: Bins, ffn_hidden_size: int, *, dtype: torch.dtype) -> "stk.Matrix":
    """Where the intermediate of all experts has its blocks.

    Args:
        padded_bins: from ``pad_bins``.
        ffn_hidden_size: F, columns of one expert, a multiple of 128.
        dtype: of the Matrix, whose data has no storage of its own: it is a pattern for ``sdd``.

    Returns:
        ``stk.Matrix`` of size [R, E·F]; the rows of expert e have blocks in columns e·F to
        (e + 1)·F.

    Raises:
        ValueError: F is not a multiple of 128, or the bins are not padded; with ``MB_DEBUG=1``,
            offsets that divide no rows.
    """
    checks.require_integer(ffn_hidden_size=ffn_hidden_size)
    _check_width("ffn_hidden_size", ffn_hidden_size)
    checks.require_bins("padded_bins.order_N", None, padded_bins)
    rows = padded_rows(padded_bins.inverse_N.numel(), padded_bins.offsets_E1.numel() - 1)
    if padded_bins.order_N.numel() != rows:  # others may be a multiple of 128 too
        raise ValueError(
            f"padded_bins: expected {rows} rows, which {padded_bins.inverse_N.numel()} slots are "
            f"padded to; got {padded_bins.order_N.numel()}. Pass pad_bins(bins)."
        )
    block_rows, width = padded_bins.order_N.numel() // BLOCK, ffn_hidden_size // BLOCK
    (offsets,) = checks.int32(padded_bins.offsets_E1)
    indices = Topology(*torch.ops.mb.topology_indices(offsets, block_rows, width))
    return make_pattern(padded_bins, ffn_hidden_size, indices, dtype)


def sparse_expert_mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    *,
    activation: str = "swiglu",
    recompute: bool = False,
) -> Tensor:
    """``expert_mlp`` by block-sparse products: same arguments, same result.

    Args:
        x_TD: [T, D]; fp32, bf16 or fp16.
        w1_EFD: [E, F, D], or [E, 2F, D] for a GLU activation, gate over up; F a multiple of 128.
        w2_EDF: [E, D, F].
        bins: from ``bin_tokens`` on expert ids [T, K] with E experts.
        weights_TK: [T, K] routing weights, normally fp32.
        activation: a name from ``mb_kernels.activation``.
        recompute: keep the inputs alone for the backward, and compute everything again there.

    Returns:
        y_TD [T, D] in the dtype of x_TD. Differentiable in x_TD, w1_EFD, w2_EDF and weights_TK.

    Raises:
        ValueError: unknown or interleaved activation; F not a multiple of 128; sizes, dtypes or
            devices that do not match.
    """
    if parse(activation).interleaved:  # the gate and up of an output would lie in one block
        raise ValueError(
            f"activation: expected one whose gate lies over up in w1_EFD; got {activation!r}. "
            "expert_mlp takes interleaved rows."
        )
    check_experts(x_TD, w1_EFD, w2_EDF, bins, weights_TK, activation)
    _check_width("F of w2_EDF", w2_EDF.shape[2])
    arguments = (x_TD, w1_EFD, w2_EDF, bins, weights_TK, activation)
    if recompute and not is_exporting():  # torch runs no exported checkpoint
        return recomputed(_sparse_expert_mlp, *arguments)
    return _sparse_expert_mlp(*arguments)


def _sparse_expert_mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    activation: str,
) -> Tensor:
    # The ops that sdd and dsd stand for, without a Matrix around them: torch.compile sees through.
    top_k, ffn = weights_TK.shape[1], w2_EDF.shape[2]
    padded = pad_bins(bins)
    slots = (padded.order_N, padded.inverse_N, padded.offsets_E1)
    x_RD = torch.ops.mb.gather(x_TD, *slots, top_k)
    block_rows = x_RD.shape[0] // BLOCK
    up = torch.ops.mb.topology_indices(padded.offsets_E1, block_rows, w1_EFD.shape[1] // BLOCK)
    down = up
    if w1_EFD.shape[1] != ffn:
        down = torch.ops.mb.topology_indices(padded.offsets_E1, block_rows, ffn // BLOCK)
    h_CBB = torch.ops.mb.sdd(x_RD[None], w1_EFD.transpose(1, 2), *up)
    # A row of blocks lies together in memory, for a GLU all of the gate's before the others.
    h_rows = h_CBB.view(block_rows, w1_EFD.shape[1] * BLOCK)
    a_rows = torch.ops.mb.activation(h_rows, activation)
    a_CBB = a_rows.view(block_rows * ffn // BLOCK, BLOCK, BLOCK)
    y_RD = torch.ops.mb.dsd(a_CBB, w2_EDF.transpose(1, 2), *down, False, 1, False)[0]
    return torch.ops.mb.combine(y_RD, *slots, weights_TK, top_k)


def _check_width(name: str, size: int) -> None:
    if size % BLOCK:
        raise ValueError(
            f"{name}: expected a multiple of {BLOCK}, the block of the sparse matrix; got {size}. "
            "expert_mlp takes any width."
        )


registration.register(
    "pad_indices(Tensor order, Tensor inverse, Tensor offsets, SymInt rows) -> "
    "(Tensor, Tensor, Tensor)",
    reference=pad_indices,
    kernels="mb_kernels.block_sparse.mlp_kernels",
    fake=lambda order, inverse, offsets, rows: (
        order.new_empty(rows),
        torch.empty_like(inverse),
        torch.empty_like(offsets),
    ),
    debug_check=lambda order, inverse, offsets, rows: checks.debug_offsets(offsets, order.shape[0]),
)
registration.register(
    "topology_indices(Tensor padded_offsets, SymInt block_rows, int width) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=lambda *arguments: tuple(topology_indices(*arguments)),
    kernels="mb_kernels.block_sparse.mlp_kernels",
    fake=empty_topology,
    debug_check=lambda padded_offsets, block_rows, width: checks.debug_offsets(
        padded_offsets, block_rows * BLOCK
    ),
)
