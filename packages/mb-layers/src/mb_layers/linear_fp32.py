"""A linear map with the accuracy of fp32, of tokens in any dtype: the router's.

Letters: T tokens, D hidden, E rows of the weight, P = 3 E.
"""

from __future__ import annotations

from typing import Any

import torch
from mb_kernels.exporting import is_exporting, transforms_active
from torch import Tensor

from mb_layers.tensors import at_least_fp32, without_autocast


def linear_fp32(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ w^T in fp32 (fp64 if one of them is), whatever the dtypes of x and w."""
    # The kernels raise the same error, but torch would complain first that a method is missing.
    if not torch.compiler.is_compiling() and transforms_active():
        raise NotImplementedError(
            "expected first derivatives by backward() or torch.autograd.grad, got a transform of "
            "torch.func (grad, vmap, jacrev, ...), of which the layer's kernels have none"
        )
    # A saved program holds no function of ours: torch.export would keep the steps of its forward
    # alone, with strict=True without a gradient for x and w.
    if is_exporting():
        x_TD, weight_ED = _alike_fp32(x_TD, weight_ED)
        return x_TD @ weight_ED.T
    return _LinearFP32.apply(x_TD, weight_ED)


class _LinearFP32(torch.autograd.Function):
    """x @ w^T with the accuracy of fp32, keeping x and w as they came for the backward pass.

    A plain `F.linear(x.float(), w.float())` keeps the fp32 copy of x: 4 D bytes per token, twice
    what the experts keep of x. It also misses the matrix units. For bf16 tokens an fp32 weight is
    written as a sum of three bf16 numbers instead, which hold its 24 bits, and the exact products
    of bf16 numbers are added up in fp32. The gradient is rounded to bf16 first, as it is in every
    other linear layer of a bf16 model.
    """

    # Not split into forward and setup_context: torch then inspects the signature on every call,
    # 25 us of host time.
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        if x_TD.dtype != torch.bfloat16 or weight_ED.dtype == torch.float64:
            x_TD, weight_ED = _alike_fp32(x_TD, weight_ED)
            return x_TD @ weight_ED.T
        if weight_ED.dtype == torch.bfloat16:
            return _mm_fp32(x_TD, weight_ED.T)
        logits_TP = _mm_fp32(x_TD, torch.cat(_three_parts(weight_ED)).T)
        return logits_TP.view(x_TD.shape[0], 3, weight_ED.shape[0]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:  # ty: ignore[incompatible-method-override]
        x_TD, weight_ED = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x_TD = grad_weight_ED = None
        rounded = x_TD.dtype == torch.bfloat16 and weight_ED.dtype != torch.float64
        # Called within autocast, as the loss is by some, it would round what forward did not. The
        # compiler sees this code where forward has turned autocast off, and runs it where it is on.
        with without_autocast(grad_TE, always=torch.compiler.is_compiling()):
            if rounded:
                grad_TE = grad_TE.to(x_TD.dtype)
            dtype = grad_TE.dtype
            if wants_x:
                grad_x_TD = (grad_TE @ weight_ED.to(dtype)).to(x_TD.dtype)
            if wants_weight:
                product = _mm_fp32 if rounded else torch.mm
                grad_weight_ED = product(grad_TE.T, x_TD.to(dtype)).to(weight_ED.dtype)
        return grad_x_TD, grad_weight_ED


def _alike_fp32(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp32, or in fp64 if one of them is."""
    x, weight = at_least_fp32(x), at_least_fp32(weight)
    if x.dtype == weight.dtype:
        return x, weight
    return x.double(), weight.double()


def _three_parts(x: Tensor) -> list[Tensor]:
    """Return three bf16 tensors that add up to x, each bringing 8 more bits of it."""
    parts = [x.bfloat16()]
    while len(parts) < 3:
        x = x.float() - parts[-1]
        parts.append(x.bfloat16())
    return parts


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Product of bf16 matrices, added up and returned in fp32."""
    if a.is_cuda and torch.version.hip is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
