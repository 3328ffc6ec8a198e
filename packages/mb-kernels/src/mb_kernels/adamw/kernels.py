"""Triton kernel of ``mb_kernels.adamw_step``: a program takes a run of elements of one tensor.

One launch serves up to 512 tensors. Which tensor a program works on it finds in a table of
addresses and of the programs that each tensor takes, so a step of a whole model is one launch per
combination of dtypes. Addresses are 64-bit, a tensor may have any number of elements.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.adamw.reference import advance
from mb_kernels.runtime.launch import cdiv, launch, power_of_two

# Per thread two 16-byte loads of each of four tensors are in flight, by 12 to 16 programs of an SM.
_BLOCK = 1024
_RUN = 32 * _BLOCK  # elements of a program: reading the table is 1% of its bytes
_TENSORS = 512  # of a launch
# Of the table: addresses of weight, grad, m, v and copy, elements, place in the op's lists, and the
# programs up to and with this tensor's.
_COLUMNS = 8

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pointer(table_ptr, column, tensor, N, TYPE, ALIGNED):
    pointer = tl.load(table_ptr + column * N + tensor).to(tl.pointer_type(TYPE))
    # Said of the pointer, not of the number it is made from: there the compiler forgets it.
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


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
    # What is left after the mask is a bf16 number: the cast at the store is exact.
    return ((x.to(tl.uint32, bitcast=True) + dither) & 0xFFFF0000).to(tl.float32, bitcast=True)


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
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    ends = tl.load(table_ptr + 7 * N + tl.arange(0, N))  # [N]
    tensor = tl.sum((ends <= program).to(tl.int32))
    start = (program - tl.max(tl.where(ends <= program, ends, 0))) * RUN
    elements = tl.load(table_ptr + 5 * N + tensor)
    todo = tl.minimum(elements - start, RUN)
    todo = tl.where(tl.load(found_inf_ptr) != 0, 0, todo)
    if ALIGNED:
        todo = (todo >> 4) * 16
    end = start + todo
    # Of three divisions an element two are by numbers of the step: products with their inverse.
    grad_factor = 1.0 / tl.load(grad_scale_ptr)
    rates_ptr += 3 * tl.load(table_ptr + 6 * N + tensor)
    size = tl.load(rates_ptr)
    root_factor = 1.0 / tl.load(rates_ptr + 1)
    t = tl.load(rates_ptr + 2).to(tl.int32)

    weights = _pointer(table_ptr, 0, tensor, N, tl.float32, ALIGNED)
    grads = _pointer(table_ptr, 1, tensor, N, GRAD, ALIGNED)
    firsts = _pointer(table_ptr, 2, tensor, N, MOMENT, ALIGNED)
    seconds = _pointer(table_ptr, 3, tensor, N, MOMENT, ALIGNED)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < end
        weight = tl.load(weights + i, mask=inside)
        grad = tl.load(grads + i, mask=inside).to(tl.float32) * grad_factor
        first = tl.load(firsts + i, mask=inside).to(tl.float32)
        second = tl.load(seconds + i, mask=inside).to(tl.float32)
        first += (grad - first) * one_minus_beta1
        second = second * beta2 + grad * grad * one_minus_beta2
        update = size * (first / (tl.sqrt(second) * root_factor + eps))
        if tl.bfloat16 == MOMENT:
            dither = _dither(weight, t)
            first = _round(first, dither & 0xFFFF)
            second = _round(second, dither >> 16)
        tl.store(firsts + i, first.to(MOMENT), mask=inside)
        tl.store(seconds + i, second.to(MOMENT), mask=inside)
        weight = weight * keep - update
        tl.store(weights + i, weight, mask=inside)
        if COPY is not None:
            copies = _pointer(table_ptr, 4, tensor, N, COPY, ALIGNED)
            tl.store(copies + i, weight.to(COPY), mask=inside)


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
    # By what a kernel is compiled for; within that in the order given.
    alike: dict[tuple[Any, ...], list[list[int]]] = {}
    tensors = (weights, grads, exp_avgs, exp_avg_sqs, copies)
    for place, (weight, grad, first, second, copy) in enumerate(zip(*tensors, strict=True)):
        given = (weight, grad, first, second, copy)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
        if weight.numel():
            aligned = not any(number % 16 for number in (*addresses, weight.numel()))
            kinds = (grad.dtype, first.dtype, None if copy is None else copy.dtype, aligned)
            alike.setdefault(kinds, []).append([*addresses, weight.numel(), place])
    for kinds, rows in alike.items():
        for begin in range(0, len(rows), _TENSORS):
            some = rows[begin : begin + _TENSORS]
            launch(
                adamw_kernel,
                (sum(cdiv(row[5], _RUN) for row in some),),
                _table(some, weights[0].device),
                rates,
                grad_scale,
                found_inf,
                1 - lr * weight_decay,
                1 - betas[0],
                betas[1],
                1 - betas[1],
                eps,
                **_constants(*kinds, len(some)),
            )
    # The kernel writes behind autograd's back; what counts writes is to know.
    written = (*weights, *exp_avgs, *exp_avg_sqs, *(copy for copy in copies if copy is not None))
    torch.autograd.graph.increment_version(written)


def _constants(
    grad: torch.dtype, moment: torch.dtype, copy: torch.dtype | None, aligned: bool, tensors: int
) -> dict[str, Any]:
    return {
        "GRAD": _TYPES[grad],
        "MOMENT": _TYPES[moment],
        "COPY": None if copy is None else _TYPES[copy],
        "ALIGNED": aligned,
        "N": power_of_two(tensors),
        "RUN": _RUN,
        # Loads of single numbers hold more addresses: half of them at a time, or sm120 spills.
        "BLOCK": _BLOCK if aligned else _BLOCK // 2,
    }


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """[_COLUMNS, N] int64 on the device, N a power of two; rows beyond the last are never found."""
    ends = itertools.accumulate(cdiv(row[5], _RUN) for row in rows)
    filled = [[*row, end] for row, end in zip(rows, ends, strict=True)]
    filled += [[0] * (_COLUMNS - 1) + [2**62]] * (power_of_two(len(rows)) - len(rows))
    columns = list(zip(*filled, strict=True))
    # From pinned memory the copy takes its turn in the stream, and the host goes on.
    host = torch.tensor(columns, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
