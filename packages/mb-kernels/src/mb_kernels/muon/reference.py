"""Twins of ``mb_kernels.muon``'s two passes."""

import torch
from torch import Tensor


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
    """Twin of ``mb_kernels.muon_momentum``."""
    # Of a step that is skipped nothing may come through, and zero times NaN is NaN.
    grad = torch.where(found_inf != 0, 0.0, grad.float() / grad_scale)
    buffer.lerp_(grad, (1.0 - momentum) * (found_inf == 0).float())
    return grad.lerp_(buffer, momentum if nesterov else 1.0).to(dtype).contiguous()


def muon_step(
    weight: Tensor,
    update: Tensor,
    copy: Tensor | None,
    *,
    size: float,
    decay: float,
    found_inf: Tensor,
) -> None:
    """Twin of ``mb_kernels.muon_step``."""
    keep = (found_inf == 0).float()
    moved = torch.where(found_inf != 0, 0.0, update.float()) * size
    weight.mul_(1.0 - decay * keep).sub_(moved)
    if copy is not None:
        copy.copy_(torch.where(found_inf != 0, copy, weight))
