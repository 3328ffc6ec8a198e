"""Kernels of ``mb_kernels.muon``: bound by memory, one pass over each tensor.

Letter: N numbers of a tensor.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.runtime.launch import cdiv, launch

# Eight numbers a thread, as 16-byte loads of 16-bit tensors want; other sizes were not timed.
_BLOCK = 2048


@triton.jit
def muon_momentum_kernel(
    grad_ptr,  # [N]
    buffer_ptr,  # [N] fp32
    direction_ptr,  # [N]
    grad_scale_ptr,
    found_inf_ptr,
    numbers,
    momentum,
    ahead,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numbers
    taken = i < tl.where(tl.load(found_inf_ptr) != 0, 0, numbers)
    grad = tl.load(grad_ptr + i, mask=taken, other=0.0).to(tl.float32) / tl.load(grad_scale_ptr)
    grad = tl.where(taken, grad, 0.0)
    buffer = tl.load(buffer_ptr + i, mask=inside, other=0.0)
    buffer = tl.where(taken, buffer * momentum + grad * (1 - momentum), buffer)
    tl.store(buffer_ptr + i, buffer, mask=taken)
    direction = buffer * (1 - ahead) + grad * ahead
    tl.store(direction_ptr + i, direction.to(direction_ptr.dtype.element_ty), mask=inside)


@triton.jit
def muon_step_kernel(
    weight_ptr,  # [N] fp32
    update_ptr,  # [N]
    copy_ptr,  # [N], or None
    found_inf_ptr,
    numbers,
    size,
    keep,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    taken = i < tl.where(tl.load(found_inf_ptr) != 0, 0, numbers)
    weight = tl.load(weight_ptr + i, mask=taken, other=0.0)
    update = tl.load(update_ptr + i, mask=taken, other=0.0).to(tl.float32)
    weight = weight * keep - update * size
    tl.store(weight_ptr + i, weight, mask=taken)
    if copy_ptr is not None:
        tl.store(copy_ptr + i, weight.to(copy_ptr.dtype.element_ty), mask=taken)


def muon_momentum(
    grad: Tensor,
    buffer: Tensor,
    *,
    momentum: float,
    nesterov: bool = True,
    grad_scale: Tensor,
    found_inf: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Launch for contiguous tensors that the op has checked."""
    direction = torch.empty_like(grad, dtype=dtype)
    tensors = (grad, buffer, direction, grad_scale, found_inf)
    ahead = 1.0 - momentum if nesterov else 0.0
    _launch(muon_momentum_kernel, tensors, grad.numel(), momentum, ahead)
    torch.autograd.graph.increment_version([buffer])  # the kernel writes behind autograd's back
    return direction


def muon_step(
    weight: Tensor,
    update: Tensor,
    copy: Tensor | None,
    *,
    size: float,
    decay: float,
    found_inf: Tensor,
) -> None:
    """Launch for contiguous tensors that the op has checked."""
    tensors = (weight, update, copy, found_inf)
    _launch(muon_step_kernel, tensors, weight.numel(), size, 1.0 - decay)
    torch.autograd.graph.increment_version([weight] if copy is None else [weight, copy])


def _launch(kernel: Any, tensors: tuple[Tensor | None, ...], numbers: int, *rates: float) -> None:
    if numbers:
        grid = (cdiv(numbers, _BLOCK),)
        launch(kernel, grid, *tensors, numbers, *rates, BLOCK=_BLOCK, num_warps=8)
