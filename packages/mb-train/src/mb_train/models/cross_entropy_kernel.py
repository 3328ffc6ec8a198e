"""The GPU half of `cross_entropy`: logits to loss and gradient in one Triton kernel.

A program owns a row: it reads it once for the sum of exponentials, kept relative to the highest
score so far (Milakov & Gimelshein, arXiv 1805.02867), and once more to write the gradient over it.

Letters: R tokens of a slice, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns per step: 16 fp32 numbers for each thread of 16 warps.
_BLOCK = 8192


def loss_and_gradient_by_kernel(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """As `cross_entropy.loss_and_gradient`, on a GPU: (loss [R] fp32, the overwritten logits)."""
    rows, columns = logits_RV.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    # ty takes the kernel for a plain function: it sees neither constexpr nor launch options.
    launch: Any = _loss_kernel[(rows,)]
    launch(logits_RV, labels_R, losses_R, columns, BLOCK=_BLOCK, num_warps=16)
    return losses_R, logits_RV


@triton.jit
def _loss_kernel(logits_ptr, labels_ptr, losses_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    label = tl.load(labels_ptr + row)
    offsets = tl.arange(0, BLOCK)
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    # The label's score is picked up here: when the gradient is written it is no longer there.
    score = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(logits_ptr + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
        score += tl.sum(tl.where(start + offsets == label, x, 0.0), 0)
    lse = peak + tl.log(total)
    tl.store(losses_ptr + row, lse - score)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(logits_ptr + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        grad = tl.exp(x - lse) - tl.where(start + offsets == label, 1.0, 0.0)
        tl.store(logits_ptr + start + offsets, grad.to(logits_ptr.dtype.element_ty), mask=inside)
