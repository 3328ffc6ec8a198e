"""Activations as ops of their own, for computations that are put together from products.

``expert_mlp`` has them inside its products; ``grouped_experts`` and the block-sparse MLP call them.

Letters: R rows, L columns.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.activation import is_glu
from mb_kernels.elementwise import reference
from mb_kernels.runtime import registration

_KERNELS = "mb_kernels.elementwise.kernels"


def _activation_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _activation_backward(ctx: Any, d_a: Tensor) -> tuple[Tensor, None]:
    (h,) = ctx.saved_tensors
    return torch.ops.mb.activation_backward(d_a, h, ctx.activation), None


def _gated_backward(ctx: Any, d_a: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    return *torch.ops.mb.gated_activation_backward(d_a, gate, up, ctx.activation), None


registration.register(
    "activation(Tensor h, str activation) -> Tensor",
    reference=reference.activation,
    kernels=_KERNELS,
    fake=lambda h, activation: h.new_empty(
        (h.shape[0], h.shape[1] // (2 if is_glu(activation) else 1))
    ),
    setup_context=_activation_setup,
    backward=_activation_backward,
)
registration.register(
    "activation_backward(Tensor d_a, Tensor h, str activation) -> Tensor",
    reference=reference.activation_backward,
    kernels=_KERNELS,
    fake=lambda d_a, h, activation: h.new_empty(h.shape),
)
registration.register(
    "gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    reference=reference.gated_activation,
    kernels=_KERNELS,
    fake=lambda gate, up, activation: gate.new_empty(gate.shape),
    setup_context=_activation_setup,
    backward=_gated_backward,
)
registration.register(
    "gated_activation_backward(Tensor d_a, Tensor gate, Tensor up, str activation) "
    "-> (Tensor, Tensor)",
    reference=reference.gated_activation_backward,
    kernels=_KERNELS,
    fake=lambda d_a, gate, up, activation: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
