"""Reference of ``mb_kernels.adamw_step``, and what reference and kernel share."""

from collections.abc import Sequence

import torch
from torch import Tensor


def advance(
    steps: Sequence[Tensor], lr: float, betas: tuple[float, float], found_inf: Tensor
) -> Tensor:
    """Count the step in every one of ``steps`` unless ``found_inf``; return what follows from it.

    Returns:
        [n, 3] fp32 on their device: lr / (1 - beta1^t), sqrt(1 - beta2^t), t. Computed in fp64,
        for 1 - beta2 of 0.001 keeps four digits in fp32; a step that is skipped before the first
        has t = 0 and nothing to divide by, and reads 1 for both.
    """
    if not steps:
        return torch.empty(0, 3)
    if steps[0].is_meta:  # a rehearsal: on meta tensors this arithmetic imports torch's compiler
        return torch.empty(len(steps), 3, device="meta")
    # One tensor for all would be read back by the host.
    torch._foreach_add_(list(steps), [(found_inf == 0).float()] * len(steps))
    t = torch.stack(list(steps)).double()
    first, second = (1.0 - beta**t for beta in betas)
    started = t > 0
    size, root = torch.where(started, lr / first, 1.0), torch.where(started, second.sqrt(), 1.0)
    return torch.stack((size, root, t), dim=1).float()


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
    """Twin of ``mb_kernels.adamw_step``."""
    rates = advance(steps, lr, betas, found_inf).tolist()
    if bool(found_inf):
        return
    together = zip(weights, grads, exp_avgs, exp_avg_sqs, copies, rates, strict=True)
    for weight, grad, exp_avg, exp_avg_sq, copy, (size, root, t) in together:
        grad = grad.to(weight.dtype) / grad_scale.to(weight.dtype)
        first, second = exp_avg.to(weight), exp_avg_sq.to(weight)
        first = first + (grad - first) * (1 - betas[0])
        second = second * betas[1] + grad * grad * (1 - betas[1])
        if exp_avg.dtype is torch.bfloat16:
            low, high = _dither(weight, int(t))
            exp_avg.copy_(_round(first, low))
            exp_avg_sq.copy_(_round(second, high))
        else:
            exp_avg.copy_(first)
            exp_avg_sq.copy_(second)
        weight.mul_(1 - lr * weight_decay).sub_(size * (first / (second.sqrt() / root + eps)))
        if copy is not None:
            copy.copy_(weight)


def _dither(weight: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Two numbers of 16 bits per weight, hashed from its bits and the step (MurmurHash3 fmix32).

    A function of the numbers alone: any sharding of the tensor rounds alike.
    """
    bits = weight.view(torch.int32).long() & 0xFFFFFFFF
    bits ^= (t * 0x9E3779B9) & 0xFFFFFFFF
    bits ^= bits >> 16
    bits = (bits * 0x85EBCA6B) & 0xFFFFFFFF
    bits ^= bits >> 13
    bits = (bits * 0xC2B2AE35) & 0xFFFFFFFF
    bits ^= bits >> 16
    return bits & 0xFFFF, bits >> 16


def _round(x: Tensor, dither: Tensor) -> Tensor:
    """fp32 to a bf16 neighbour, up with the probability that makes it right on average."""
    bits = (x.view(torch.int32) + dither.int()) & -0x10000
    # A GPU's NaN has all bits set: the sum would carry into the sign and leave a zero.
    return torch.where(x.isnan(), x, bits.view(torch.float32))
