"""The two passes over memory around Muon's orthogonalisation, each byte read and written once.

    g <- grad / grad_scale
    m <- m + (1 - momentum) (g - m)        direction <- m + (1 - momentum) (g - m), in 16 bits
    w <- (1 - lr weight_decay) w - size update        copy <- w, in its own dtype

Muon by Jordan et al. (kellerjordan.github.io/posts/muon), with Nesterov's momentum; without it the
direction is m. As with ``adamw_step`` the divisor holds clipping and loss scale, a step that is
skipped changes nothing, and nothing is read back.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.muon import reference
from mb_kernels.runtime import checks, registration
from mb_kernels.uncompiled import uncompiled_step

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@uncompiled_step
@torch.no_grad()
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
    """Move the momentum ``buffer`` in place; return the direction to orthogonalise.

    Args:
        grad: fp32, bf16 or fp16, left as it is; of any shape.
        buffer: fp32, of its shape: the momentum.
        momentum: from 0 up to but not 1.
        nesterov: the direction is a step ahead of the momentum, else the momentum itself.
        grad_scale: fp32 scalar on the device; the gradient is divided by it.
        found_inf: fp32 scalar on the device; if it is not zero, the buffer stays, and the gradient
            counts as zeros.
        dtype: of the direction, fp32, bf16 or fp16.

    Returns:
        The direction in the shape of grad, contiguous.

    Raises:
        ValueError: tensors of other shapes, dtypes or devices, or another dtype to return; a
            momentum outside of [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ValueError(
            f"momentum: expected a number from 0 up to 1, without it; got {momentum!r}. With 1 the "
            "buffer never moves, and the direction is what it was at first."
        )
    if dtype not in _FLOATS:
        raise ValueError(f"dtype: expected {' or '.join(map(str, _FLOATS))}; got {dtype}.")
    checks.require_exactly("grad", grad, _FLOATS)
    checks.require_exactly("buffer", buffer, _FLOATS[:1], grad.shape, grad)
    checks.require_scalar("grad_scale", grad_scale, grad)
    checks.require_scalar("found_inf", found_inf, grad)
    compute = _implementation("muon_momentum", grad, buffer)
    rates = {"momentum": momentum, "nesterov": nesterov}
    flags = {"grad_scale": grad_scale, "found_inf": found_inf}
    with registration.device_of(grad):
        return compute(grad, buffer, **rates, **flags, dtype=dtype)


@uncompiled_step
@torch.no_grad()
def muon_step(
    weight: Tensor,
    update: Tensor,
    copy: Tensor | None,
    *,
    size: float,
    decay: float,
    found_inf: Tensor,
) -> None:
    """Shrink ``weight`` by ``decay`` and move it against ``update`` by ``size``, in place.

    Args:
        weight: fp32, of any shape.
        update: of its shape; fp32, bf16 or fp16.
        copy: bf16 or fp16 of the same shape, or None: the weight to compute with, written too.
        size: the learning rate times the scale of an update.
        decay: what is taken of the weight, learning rate times weight decay.
        found_inf: fp32 scalar on the device; if it is not zero, nothing changes.

    Raises:
        ValueError: tensors of other shapes, dtypes or devices.
    """
    checks.require_exactly("weight", weight, _FLOATS[:1])
    checks.require_exactly("update", update, _FLOATS, weight.shape, weight)
    if copy is not None:
        checks.require_exactly("copy", copy, _FLOATS[1:], weight.shape, weight)
    checks.require_scalar("found_inf", found_inf, weight)
    tensors = (weight, update) if copy is None else (weight, update, copy)
    step = _implementation("muon_step", *tensors)
    with registration.device_of(weight):
        step(weight, update, copy, size=size, decay=decay, found_inf=found_inf)


def _implementation(name: str, *tensors: Tensor) -> Any:
    """Kernels take element i of each as it lies in memory, without gaps. Others are rare."""
    as_it_lies = all(t.is_contiguous() and not t.is_neg() for t in tensors)
    if not registration.use_triton(tensors[0]) or not as_it_lies:
        return getattr(reference, name)
    from mb_kernels.muon import kernels

    return getattr(kernels, name)
