"""One AdamW step over many tensors, each byte of them read and written once.

    g <- grad / grad_scale
    m <- m + (1 - beta1) (g - m)          v <- beta2 v + (1 - beta2) g^2
    w <- (1 - lr weight_decay) w - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    copy <- w, in its own dtype

AdamW by Loshchilov and Hutter (arXiv 1711.05101), in the order of torch's. The gradient's divisor
holds clipping and loss scale, so neither costs a pass. It is not a ``torch.library`` op: it has no
gradient, and a step is no part of a compiled graph.

Moments in bf16 are rounded stochastically. To nearest, v would never shrink: a beta2 of 0.999 takes
at most a thousandth of it away, and a bf16 number ends after eight bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mb_kernels.adamw import reference
from mb_kernels.runtime import checks, registration
from mb_kernels.uncompiled import uncompiled_step


@uncompiled_step
@torch.no_grad()
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
    """Update ``weights``, moments, ``copies`` and ``steps`` in place; nothing is read back.

    Args:
        weights: fp32 (fp64 runs the reference), all on one device.
        grads: of their shapes; fp32, bf16 or fp16. Left as they are.
        exp_avgs, exp_avg_sqs: the moments m and v, fp32 or bf16. Beside a GPU they may lie in
            pinned memory of the host, which the kernel reads and writes where it is, at the speed
            of the link between them. The call then waits for the GPU, as the host may read them.
        copies: bf16 or fp16 of the same shape, or None: the weight to compute with.
        steps: fp32 scalars, t of every weight before this step.
        lr, betas, eps, weight_decay: AdamW's. A change compiles nothing.
        grad_scale: fp32 scalar on the device; gradients are divided by it.
        found_inf: fp32 scalar on the device; if it is not zero, nothing changes, steps included.

    Raises:
        ValueError: lists of unequal length; a tensor of another shape, dtype, device or order of
            elements in memory than its weight's; weights of several dtypes or devices; one tensor
            several times, or in two roles, if it is written; betas outside of [0, 1); moments in
            host memory that is not pinned, or in any while a CUDA graph is captured, which cannot
            wait.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"betas: expected two numbers from 0 up to 1, without it; got {tuple(betas)}. With 1 a "
            "moment never moves, and its correction divides by 0."
        )
    lists = (grads, exp_avgs, exp_avg_sqs, copies, steps)
    if any(len(other) != len(weights) for other in lists):
        raise ValueError(
            f"expected lists of one length, got {len(weights)} weights and "
            f"{', '.join(str(len(other)) for other in lists)} of the rest"
        )
    if not weights:
        return
    for index, weight in enumerate(weights):
        _check(index, weight, grads[index], exp_avgs[index], exp_avg_sqs[index], copies[index])
        if weight.dtype is not weights[0].dtype or weight.device != weights[0].device:
            raise ValueError(
                f"weights[{index}]: expected {weights[0].dtype} on {weights[0].device}, as the "
                f"first; got {weight.dtype} on {weight.device}. Step each kind by itself."
            )
        checks.require_scalar("steps", steps[index], weight)
    on_host = any(moment.device != weights[0].device for moment in (*exp_avgs, *exp_avg_sqs))
    if on_host and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "expected moments on the GPU while a CUDA graph is captured; got some in host memory, "
            "for which the host has to wait. Step outside of the graph."
        )
    _check_apart(
        grads,
        weights=weights,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        copies=copies,
        steps=steps,
    )
    checks.require_scalar("grad_scale", grad_scale, weights[0])
    checks.require_scalar("found_inf", found_inf, weights[0])
    step = reference.adamw_step
    if registration.use_triton(weights[0]):
        from mb_kernels.adamw.kernels import adamw_step as step
    # Kernels read memory as it lies; the gradient of an imaginary part may lie there negated.
    grads = [grad.resolve_neg() for grad in grads]
    with registration.device_of(weights[0]):
        step(
            *(weights, grads, exp_avgs, exp_avg_sqs, copies, steps),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if on_host:  # what the host reads is not in the order of the stream
            torch.cuda.current_stream().synchronize()


_WEIGHTS = (torch.float32, torch.float64)
_HALVES = (torch.bfloat16, torch.float16)


def _check(
    index: int, weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, copy: Tensor | None
) -> None:
    if weight.dtype not in _WEIGHTS:
        raise ValueError(
            f"weights[{index}]: expected fp32; got {weight.dtype}. Keep an fp32 master weight and "
            "pass the 16-bit one as its copy."
        )
    if grad is None or m is None or v is None:
        raise ValueError(
            f"weights[{index}]: expected a gradient and two moments beside it; got None in place "
            "of one. Leave out weights without a gradient."
        )
    moments = (weight.dtype, torch.bfloat16) if weight.dtype is torch.float32 else (weight.dtype,)
    allowed = {
        "grads": (grad, (weight.dtype, *_HALVES)),
        "exp_avgs": (m, moments),
        "exp_avg_sqs": (v, (m.dtype,)),
        "copies": (copy, _HALVES),
    }
    for name, (tensor, dtypes) in allowed.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{name}[{index}]: expected {' or '.join(map(str, dtypes))}; got {tensor.dtype}."
            )
        is_moment = tensor is m or tensor is v
        here = tensor.device == weight.device or (is_moment and _within_reach(weight, tensor))
        if not here or tensor.shape != weight.shape:
            pinned = ", or in pinned host memory" if is_moment and weight.is_cuda else ""
            raise ValueError(
                f"{name}[{index}]: expected {tuple(weight.shape)} on {weight.device}{pinned}, as "
                f"its weight; got {tuple(tensor.shape)} on {tensor.device}."
            )
        if not _same_order(weight, tensor):
            raise ValueError(
                f"{name}[{index}]: expected a dense tensor with its weight's strides "
                f"{weight.stride()}; got {tensor.stride()}. Copy it into torch.empty_like(weight), "
                "or replace the weight, if it has gaps in memory, by weight.contiguous()."
            )


def _within_reach(weight: Tensor, other: Tensor) -> bool:
    """Whether a kernel beside the weight, on a GPU, can read and write what the host holds."""
    on_host = weight.is_cuda and other.device.type == "cpu"
    return on_host and (other.is_pinned() or not other.numel())  # torch pins no memory for none


def _check_apart(grads: Sequence[Tensor], **written: Sequence[Tensor | None]) -> None:
    """One step for all would count up once a weight; other tensors would be a race.

    By where they begin in memory, as ``weight.data`` twice are two tensors. Gradients are only
    read, and may be one for several weights.
    """
    # Every optimizer step comes by: no names before there is need. Nothing begins at 0.
    begins = [_begin(tensor) for tensors in written.values() for tensor in tensors]
    begins = [begin for begin in begins if begin]
    places = set(begins)
    if len(places) == len(begins) and places.isdisjoint(map(_begin, grads)):
        return
    seen: dict[int, str] = {}
    for name, tensors in (*written.items(), ("grads", grads)):
        for index, tensor in enumerate(tensors):
            here, begin = f"{name}[{index}]", _begin(tensor)
            if not begin or (name == "grads" and begin not in places):
                continue
            if seen.setdefault(begin, here) != here:
                raise ValueError(
                    f"{here}: expected a tensor of its own; got the memory of {seen[begin]}, and "
                    "one of them is written. Make one for each weight, and pass a tied weight once."
                )


def _begin(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _same_order(weight: Tensor, other: Tensor) -> bool:
    """Whether element i in memory of the one is element i of the other, without gaps."""
    if weight.is_contiguous():
        return other.is_contiguous()
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return weight.stride() == other.stride() and dense(weight)
