"""A linear map whose two products with its weight are products of 8-bit floats.

Letters: N rows (all leading dims), K inputs, M outputs.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mb_kernels.float8.reference import float8_product as float8_product_reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.widths import cut, lacking, widened


def float8_linear(x_NK: Tensor, w_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """``x @ w^T + bias``, and its gradient for x, of operands rounded by ``to_float8``.

    The gradient of w is the product of what was not rounded.

    Args:
        x_NK: [..., K]; on a GPU in bf16, see ``require_float8``. A K or M that is no multiple of 16
            costs wider copies there.
        w_MK: [M, K] in the dtype of x_NK.
        bias_M: [M] in the dtype of x_NK, or None.

    Returns:
        [..., M] in the dtype of x_NK. Differentiable in all three, once.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a GPU without 8-bit products; there a
            weight of 2**31 elements, or 2**24 rows or columns.
    """
    biases = {} if bias_M is None else {"bias_M": bias_M}
    checks.require_same("x_NK", x_NK, w_MK=w_MK, **biases)
    if w_MK.ndim != 2 or x_NK.ndim < 1 or x_NK.shape[-1] != w_MK.shape[1]:
        raise ValueError(
            f"w_MK: expected [M, K] with the K of x_NK {tuple(x_NK.shape)}; got "
            f"{tuple(w_MK.shape)}."
        )
    if bias_M is not None and bias_M.shape != w_MK.shape[:1]:
        raise ValueError(f"bias_M: expected [{w_MK.shape[0]}]; got {tuple(bias_M.shape)}.")
    checks.require_float8("x_NK", x_NK)
    checks.require_addressable("w_MK", w_MK, w_MK.shape)
    inputs, outputs = w_MK.shape[1], w_MK.shape[0]
    more_K, more_M = lacking(x_NK, inputs), lacking(x_NK, outputs)
    x = widened(x_NK.reshape(math.prod(x_NK.shape[:-1]), inputs), more_K)
    w = widened(w_MK, more_K, more_M)
    y = cut(torch.ops.mb.float8_product(x, w, True), outputs)
    y = y.view(*x_NK.shape[:-1], outputs)
    return y if bias_M is None else y + bias_M


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.transpose_weight = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.mb.float8_product(dy, w, not ctx.transpose_weight)
    if ctx.needs_input_grad[1]:
        with registration.without_autocast(dy):
            dw = dy.mT @ x if ctx.transpose_weight else x.mT @ dy
    return dx, dw, None


def _flops(x_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * w_shape[0] * w_shape[1]


registration.register(
    "float8_product(Tensor x, Tensor w, bool transpose_weight) -> Tensor",
    reference=float8_product_reference,
    kernels="mb_kernels.float8.product",
    fake=lambda x, w, transpose_weight: x.new_empty(
        (x.shape[0], w.shape[0 if transpose_weight else 1])
    ),
    flops=_flops,
    setup_context=_setup,
    backward=_backward,
)
