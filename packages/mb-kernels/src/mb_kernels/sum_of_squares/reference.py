"""Reference of ``mb_kernels.sum_of_squares``."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Twin of ``mb_kernels.sum_of_squares``."""
    # A CPU adds up in sequence: in fp32 the norm of a million numbers is off by up to 1e-4.
    on_cpu = tensors[0].device.type == "cpu"
    norms = []
    for double in (False, True):
        some = [x for x in tensors if (x.dtype is torch.float64) == double and x.numel()]
        if some:
            dtype = torch.float64 if double or on_cpu else torch.float32
            norms += [norm.float() for norm in torch._foreach_norm(some, 2, dtype=dtype)]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    return torch.stack(norms).square().sum()
