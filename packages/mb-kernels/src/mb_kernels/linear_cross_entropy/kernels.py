"""Triton kernels of the head's cross entropy: a program owns a row of a slice's logits.

It reads the row once for the sum of exponentials, kept relative to the highest score so far
(Milakov & Gimelshein, arXiv 1805.02867), and once more to write the gradient over it. For a
vocabulary that is spread over ranks the two halves are two launches, the exchange between them.

Letters: T tokens, R tokens of a slice, D hidden, V vocabulary or this rank's share of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.linear_cross_entropy import slices
from mb_kernels.runtime.launch import launch

# 8192 rows of 50,304 bf16 logits on an H200: 0.63 ms, 0.72 with 8192 columns and 16 warps, 0.66
# with 4096 and 16; reading and writing them once takes 0.39.
_BLOCK = 2048
_WARPS = 8


@triton.jit
def _read_row(logits_ptr, label, columns, BLOCK: tl.constexpr):
    """Highest score, sum of exponentials relative to it, score of column `label` (0 if none)."""
    offsets = tl.arange(0, BLOCK)
    # By lane: nothing is summed over the program until the row is read, so loads run ahead.
    peaks = tl.full((BLOCK,), float("-3.4e38"), tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    # Read first: when the gradient is written the label's score is no longer there.
    own = (label >= 0) & (label < columns)
    score = tl.load(logits_ptr + label, mask=own, other=0.0).to(tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + offsets
        x = tl.load(logits_ptr + column, mask=column < columns, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(peaks, x)
        totals = totals * tl.exp(peaks - higher) + tl.exp(x - higher)
        peaks = higher
    peak = tl.max(peaks, 0)
    return peak, tl.sum(totals * tl.exp(peaks - peak), 0), score


@triton.jit
def _write_gradient(logits_ptr, label, peak, total, weight, columns, BLOCK: tl.constexpr):
    # Of peak + total, at scores of 300, fp32 would keep four digits of exp.
    offsets = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        column = first + offsets
        x = tl.load(logits_ptr + column, mask=column < columns, other=float("-inf"))
        grad = tl.exp(x.to(tl.float32) - peak - total) - tl.where(column == label, 1.0, 0.0)
        # A row without weight writes zeros, whatever its scores are.
        grad = tl.where(weight == 0, 0.0, grad * weight)
        tl.store(logits_ptr + column, grad.to(logits_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def linear_cross_entropy_kernel(
    logits_ptr,  # [R, columns], overwritten by the gradient
    labels_ptr,  # [R] int64
    weights_ptr,  # [R] fp32
    losses_ptr,  # [R] fp32
    columns,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    label = tl.load(labels_ptr + row)
    peak, total, score = _read_row(logits_ptr, label, columns, BLOCK)
    total = tl.log(total)
    tl.store(losses_ptr + row, tl.where(label < 0, 0.0, total + (peak - score)))
    if GRADIENT:
        weight = tl.load(weights_ptr + row)
        _write_gradient(logits_ptr, label, peak, total, weight, columns, BLOCK)


@triton.jit
def row_statistics_kernel(
    logits_ptr,  # [R, columns]
    labels_ptr,  # [R] int64
    statistics_ptr,  # [R, 3] fp32
    start,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row) - start
    peak, total, score = _read_row(logits_ptr + row * columns, label, columns, BLOCK)
    tl.store(statistics_ptr + row * 3, peak)
    tl.store(statistics_ptr + row * 3 + 1, total)
    tl.store(statistics_ptr + row * 3 + 2, score)


@triton.jit
def row_gradients_kernel(
    logits_ptr,  # [R, columns], overwritten
    labels_ptr,  # [R] int64
    peaks_ptr,  # [R] fp32
    totals_ptr,  # [R] fp32, as logarithms
    weights_ptr,  # [R] fp32
    start,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row) - start
    peak = tl.load(peaks_ptr + row)
    total = tl.load(totals_ptr + row)
    weight = tl.load(weights_ptr + row)
    _write_gradient(logits_ptr + row * columns, label, peak, total, weight, columns, BLOCK)


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_T: Tensor,
    weights_T: Tensor,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, ...]:
    """The op's implementation, see `op`."""
    needs = slices.Needs(need_x, need_weight, need_bias)

    def finish(logits_RV: Tensor, labels_R: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        return losses_and_gradients(logits_RV, labels_R, weights_R, gradient=any(needs))

    losses_T, *grads = slices.run(x_TD, weight_VD, bias_V, labels_T, weights_T, needs, finish)
    return (losses_T * weights_T).sum(), losses_T, *grads


def losses_and_gradients(
    logits_RV: Tensor, labels_R: Tensor, weights_R: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Loss of each row, fp32, and the gradient in the place of the (contiguous) logits."""
    rows, columns = logits_RV.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    launch(
        linear_cross_entropy_kernel,
        (rows,),
        logits_RV,
        labels_R,
        weights_R,
        losses_R,
        columns,
        GRADIENT=gradient,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return losses_R, logits_RV


def row_statistics(logits_RV: Tensor, labels_R: Tensor, start: int) -> Tensor:
    """As `reference.row_statistics`."""
    rows, columns = logits_RV.shape
    statistics_R3 = torch.empty(rows, 3, dtype=torch.float32, device=logits_RV.device)
    arguments = (logits_RV, labels_R, statistics_R3, start, columns)
    launch(row_statistics_kernel, (rows,), *arguments, BLOCK=_BLOCK, num_warps=_WARPS)
    return statistics_R3


def row_gradients(
    logits_RV: Tensor,
    labels_R: Tensor,
    peaks_R: Tensor,
    totals_R: Tensor,
    weights_R: Tensor,
    start: int,
) -> Tensor:
    """As `reference.row_gradients`, in the place of the logits."""
    rows, columns = logits_RV.shape
    arguments = (logits_RV, labels_R, peaks_R, totals_R, weights_R, start, columns)
    launch(row_gradients_kernel, (rows,), *arguments, BLOCK=_BLOCK, num_warps=_WARPS)
    return logits_RV
