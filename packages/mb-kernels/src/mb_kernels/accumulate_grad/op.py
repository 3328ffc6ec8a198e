"""A micro-batch's gradient added to those before it, in fp32, each byte read and written once.

A gradient of 16 bits that is added up in 16 bits loses what is smaller than a 256th of the sum. In
fp32 torch adds one at two thirds of the speed (``kernels`` has the figures).
"""

import torch
from torch import Tensor

from mb_kernels.accumulate_grad import reference
from mb_kernels.runtime import checks, registration
from mb_kernels.uncompiled import uncompiled_step

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@uncompiled_step
@torch.no_grad()
def accumulate_grad(total: Tensor, grad: Tensor) -> Tensor:
    """``total + grad`` in fp32; no gradient flows through it.

    Args:
        total: fp32, which is written in place; or bf16 or fp16, which is left as it is: the first
            gradient, in the dtype it came in.
        grad: fp32, bf16 or fp16, of its shape, left as it is.

    Returns:
        fp32: ``total`` itself where it is fp32, else a new tensor.

    Raises:
        ValueError: tensors of other shapes, dtypes or devices.
        RuntimeError: elements of a ``total`` in place that share memory, with each other or with
            others of ``grad``.
    """
    checks.require_exactly("total", total, _FLOATS)
    checks.require_exactly("grad", grad, _FLOATS, total.shape, total)
    compute = reference.accumulate_grad
    if registration.use_triton(total) and _as_they_lie(total, grad):
        from mb_kernels.accumulate_grad.kernels import accumulate_grad as compute
    with registration.device_of(total):
        return compute(total, grad)


def _as_they_lie(total: Tensor, grad: Tensor) -> bool:
    """Whether element i of both is the same one, and none is in memory that another is in.

    What is not so is rare: torch adds it, or says why it cannot.
    """
    return (
        torch.ops.aten.is_non_overlapping_and_dense(total)
        and total.stride() == grad.stride()
        and not (total.is_neg() or grad.is_neg())
        and (total.is_meta or _address(total) != _address(grad))
    )


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
