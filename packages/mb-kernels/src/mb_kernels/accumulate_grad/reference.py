"""Reference of ``mb_kernels.accumulate_grad``."""

from torch import Tensor


def accumulate_grad(total: Tensor, grad: Tensor) -> Tensor:
    """Twin of ``mb_kernels.accumulate_grad``."""
    return total.float().add_(grad)
