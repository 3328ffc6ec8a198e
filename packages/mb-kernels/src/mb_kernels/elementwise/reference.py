"""Reference of ``mb_kernels.elementwise``: in fp32 (fp64 for fp64), rounded once.

Letters: R rows, L columns.
"""

import torch
from torch import Tensor

from mb_kernels import activation as functions
from mb_kernels.runtime.precision import wide


def activation(h: Tensor, name: str) -> Tensor:
    """h [R, L], or [R, 2L] gate before up, to [R, L]."""
    return functions.activate(wide(h), name).to(h.dtype)


def activation_backward(d_a: Tensor, h: Tensor, name: str) -> Tensor:
    return functions.activate_backward(wide(d_a), wide(h), name).to(h.dtype)


def gated_activation(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Gate and up apart, [R, L] each."""
    return activation(torch.cat([gate, up], dim=1), name)


def gated_activation_backward(
    d_a: Tensor, gate: Tensor, up: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    d_h = activation_backward(d_a, torch.cat([gate, up], dim=1), name)
    # Of one row the halves would be contiguous as they are: two outputs with one storage.
    d_gate, d_up = (d.clone(memory_format=torch.contiguous_format) for d in d_h.chunk(2, dim=1))
    return d_gate, d_up
