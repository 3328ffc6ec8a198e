"""The sum of the squares of many tensors: one launch for many of them, each byte read once.

Sums are in fp32 and in a fixed order, so that the same call gives the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mb_kernels.runtime import checks, registration
from mb_kernels.sum_of_squares import reference


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The square of the joint L2 norm of ``tensors``; no gradient flows through it.

    Args:
        tensors: at least one, of any shapes and strides, all on one device; fp32, bf16, fp16 or
            fp64, and of different dtypes. A tensor without elements counts as zero.

    Returns:
        fp32 scalar on their device. NaN if they hold a NaN; infinite if they hold an infinity or
        the sum is above fp32's 3.4e38.

    Raises:
        ValueError: no tensor; one that is sparse, holds no floating-point numbers or is on another
            device than the first.
    """
    tensors = list(tensors)
    if not tensors:
        raise ValueError("tensors: expected at least one; got none. Of no tensors it is 0.")
    for index, x in enumerate(tensors):
        checks.require_floating(f"tensors[{index}]", x)
        checks.require_device("tensors[0]", tensors[0], **{f"tensors[{index}]": x})
    return torch.ops.mb.sum_of_squares([x.detach() if x.requires_grad else x for x in tensors])


def _fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


registration.register(
    "sum_of_squares(Tensor[] tensors) -> Tensor",
    reference=reference.sum_of_squares,
    fake=_fake,
    kernels="mb_kernels.sum_of_squares.kernels",
    strided=True,
)
