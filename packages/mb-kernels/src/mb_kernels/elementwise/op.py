"""Activation and bias as ops of their own, for computations that are put together from products.

``expert_mlp`` has them inside its products; ``grouped_experts``, experts with biases and the
block-sparse MLP call these.

Letters: R rows, L columns, E experts.
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


def _bias_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, offsets = inputs
    ctx.save_for_backward(offsets)
    ctx.bias_dtype = bias.dtype


def _bias_backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, Tensor | None, None]:
    (offsets,) = ctx.saved_tensors
    d_bias = None
    if ctx.needs_input_grad[1]:
        # Sums over runs of rows are a weight gradient of ones, of which 16 are the least it takes.
        ones = d_rows.new_ones((d_rows.shape[0], 16))
        d_bias = torch.ops.mb.grouped_outer(ones, d_rows, offsets)[:, 0].to(ctx.bias_dtype)
    return d_rows, d_bias, None


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
registration.register(
    "add_bias(Tensor rows, Tensor bias, Tensor offsets) -> Tensor",
    reference=reference.add_bias,
    kernels=_KERNELS,
    fake=lambda rows, bias, offsets: rows.new_empty(rows.shape),
    setup_context=_bias_setup,
    backward=_bias_backward,
    differentiable_twice=True,
)
