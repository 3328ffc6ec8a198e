"""Triton kernel of ``mb_kernels.adamw_step``: a program takes a block of one tensor.

One launch serves up to 512 tensors. A program finds its tensor in a table of addresses and of how
many programs each tensor takes. So a step of a whole model is one launch for every 512 tensors of
the same dtypes. Addresses are 64-bit: a tensor may have any number of elements.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.adamw.reference import advance
from mb_kernels.language import tables as language
from mb_kernels.runtime.launch import launch
from mb_kernels.runtime.tables import Entry, batches

# A block a program, in the order of memory: a step of 3.69 B weights with its norm takes one H200
# 27.6 ms in fp32 and 19.3 with all but the weights in 16 bits; in blocks of 2048 28.0 and 19.9, in
# twice the threads 27.6 and 20.1. Programs that walk through 32,768 numbers each cost 1.0 ms more.
_BLOCK = 1024


@triton.jit
def _dither(weight, t):
    # MurmurHash3's fmix32 of the weight's bits and the step, as in the reference.
    bits = weight.to(tl.uint32, bitcast=True) ^ (t.to(tl.uint32) * 0x9E3779B9)
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _round(x, dither):
    # What is left after the mask is a bf16 number: the cast at the store is exact. A GPU's NaN has
    # all bits set, and a number added to it would carry into the sign and leave a zero.
    bits = (x.to(tl.uint32, bitcast=True) + dither) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def adamw_kernel(
    table_ptr,
    rates_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    keep,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, place = language.find(table_ptr + 7 * N, N)
    start = place * BLOCK
    todo = tl.minimum(tl.load(table_ptr + 5 * N + tensor) - start, BLOCK)
    todo = tl.where(tl.load(found_inf_ptr) != 0, 0, todo)
    if ALIGNED:
        todo = (todo >> 4) * 16
    # Two of an element's three divisions are by numbers of the step: multiply by their inverses.
    grad_factor = 1.0 / tl.load(grad_scale_ptr)
    rates_ptr += 3 * tl.load(table_ptr + 6 * N + tensor)
    size = tl.load(rates_ptr)
    root_factor = 1.0 / tl.load(rates_ptr + 1)
    t = tl.load(rates_ptr + 2).to(tl.int32)

    i = tl.arange(0, BLOCK)
    inside = i < todo
    weights = language.pointer(table_ptr, tensor, tl.float32, ALIGNED) + start + i
    grads = language.pointer(table_ptr + N, tensor, GRAD, ALIGNED) + start + i
    firsts = language.pointer(table_ptr + 2 * N, tensor, MOMENT, ALIGNED) + start + i
    seconds = language.pointer(table_ptr + 3 * N, tensor, MOMENT, ALIGNED) + start + i
    weight = tl.load(weights, mask=inside)
    grad = tl.load(grads, mask=inside).to(tl.float32) * grad_factor
    first = tl.load(firsts, mask=inside).to(tl.float32)
    second = tl.load(seconds, mask=inside).to(tl.float32)
    first += (grad - first) * one_minus_beta1
    second = second * beta2 + grad * grad * one_minus_beta2
    update = size * (first / (tl.sqrt(second) * root_factor + eps))
    if tl.bfloat16 == MOMENT:
        dither = _dither(weight, t)
        first = _round(first, dither & 0xFFFF)
        second = _round(second, dither >> 16)
    tl.store(firsts, first.to(MOMENT), mask=inside)
    tl.store(seconds, second.to(MOMENT), mask=inside)
    weight = weight * keep - update
    tl.store(weights, weight, mask=inside)
    if COPY is not None:
        copies = language.pointer(table_ptr + 4 * N, tensor, COPY, ALIGNED) + start + i
        tl.store(copies, weight.to(COPY), mask=inside)


def adamw_step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Launch for tensors that the op has checked, all on one device."""
    rates = advance(steps, lr, betas, found_inf)
    tensors = (weights, grads, exp_avgs, exp_avg_sqs, copies)
    entries = []
    for place, (weight, grad, first, second, copy) in enumerate(zip(*tensors, strict=True)):
        dtypes = (grad.dtype, first.dtype, None if copy is None else copy.dtype)
        given = (weight, grad, first, second, copy)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        entries.append(Entry(dtypes, addresses, weight.numel(), (place,)))
    for types, is_aligned, table, programs in batches(entries, _BLOCK, weights[0].device):
        grad_type, moment_type, copy_type = types
        launch(
            adamw_kernel,
            (programs,),
            table,
            rates,
            grad_scale,
            found_inf,
            1 - lr * weight_decay,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            GRAD=grad_type,
            MOMENT=moment_type,
            COPY=copy_type,
            ALIGNED=is_aligned,
            N=table.shape[1],
            BLOCK=_BLOCK,
        )
    # Autograd does not see the kernel's writes, so its version counters are raised here.
    written = (*weights, *exp_avgs, *exp_avg_sqs, *(copy for copy in copies if copy is not None))
    torch.autograd.graph.increment_version(written)
