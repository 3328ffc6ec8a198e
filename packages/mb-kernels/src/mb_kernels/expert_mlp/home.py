"""``expert_mlp`` that stores its result on the ranks that the tokens came from.

This is not a ``torch.library`` op, because it writes to memory that is none of its arguments. A
selective checkpoint that kept its output, instead of running it again, would lose these writes.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.derivatives import once_differentiable
from mb_kernels.expert_mlp import op, steps
from mb_kernels.runtime import checks, registration


class ExpertMLPHome(torch.autograd.Function):
    """Takes the arguments of ``mb::expert_mlp`` and the addresses; its first result is NaN."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *inputs, ctx.home_P = (a.contiguous() if isinstance(a, Tensor) else a for a in arguments)
        x, _, _, order, _, offsets, *_ = inputs
        if registration.debugging(x):
            checks.debug_offsets(offsets, order.shape[0])
        with registration.device_of(x):
            _, *kept = steps.expert_mlp(*inputs, home=ctx.home_P)
        outputs = (_elsewhere(x), *kept)
        op.set_up(ctx, inputs, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        def compute(do: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
            with registration.device_of(do):
                arguments = (do.contiguous(), x, *others)
                _, *grads = steps.expert_mlp_backward(*arguments, home=ctx.home_P)
            return (_elsewhere(do), *grads)

        return op.gradients(ctx, do, compute)


def _elsewhere(like: Tensor) -> Tensor:
    """NaN in place of a tensor that is on other ranks."""
    return like.new_full((), torch.nan).expand(like.shape)
