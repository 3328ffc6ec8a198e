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
    what the experts keep of x. It also misses the matrix units. For tokens in 16 bits an fp32
    weight is written as a sum of three numbers of 16 bits instead, which hold its 24 bits, and the
    exact products of these numbers are added up in fp32. The gradient is rounded to 16 bits first,
    as it is in every other linear layer of such a model.
    """

    # Not split into forward and setup_context: torch then inspects the signature on every call,
    # 25 us of host time.
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        if weight_ED.dtype == torch.float64 or not _in_halves(x_TD):
            x_TD, weight_ED = _alike_fp32(x_TD, weight_ED)
            return x_TD @ weight_ED.T
        if weight_ED.dtype == x_TD.dtype:
            return _mm_fp32(x_TD, weight_ED.T)
        if x_TD.dtype == torch.float16:
            return _fp16_product(x_TD, weight_ED)
        logits_TP = _mm_fp32(x_TD, torch.cat(_three_parts(weight_ED)).T)
        return logits_TP.view(x_TD.shape[0], 3, weight_ED.shape[0]).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:  # ty: ignore[incompatible-method-override]
        x_TD, weight_ED = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        grad_x_TD = grad_weight_ED = None
        rounded = _in_halves(x_TD) and weight_ED.dtype != torch.float64
        # Called within autocast, as the loss is by some, it would round what forward did not. The
        # compiler sees this code where forward has turned autocast off, and runs it where it is on.
        with without_autocast(grad_TE, always=torch.compiler.is_compiling()):
            if rounded and x_TD.dtype == torch.float16:
                if wants_x:
                    grad_x_TD = _fp16_grad_x(grad_TE, weight_ED).to(x_TD.dtype)
                if wants_weight:
                    grad_weight_ED = _fp16_grad_weight(grad_TE, x_TD).to(weight_ED.dtype)
                return grad_x_TD, grad_weight_ED
            if rounded:
                grad_TE = grad_TE.to(x_TD.dtype)
            dtype = grad_TE.dtype
            if wants_x:
                grad_x_TD = (grad_TE @ weight_ED.to(dtype)).to(x_TD.dtype)
            if wants_weight:
                product = _mm_fp32 if rounded else torch.mm
                grad_weight_ED = product(grad_TE.T, x_TD.to(dtype)).to(weight_ED.dtype)
        return grad_x_TD, grad_weight_ED


def _in_halves(x: Tensor) -> bool:
    """Whether to multiply numbers of 16 bits. fp16 only gains where there are units for them."""
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float16 and _has_units(x))


def _has_units(x: Tensor) -> bool:
    """Whether torch multiplies 16 bits into fp32 there."""
    return x.is_cuda and torch.version.hip is None


def _alike_fp32(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp32, or in fp64 if one of them is."""
    x, weight = at_least_fp32(x), at_least_fp32(weight)
    if x.dtype == weight.dtype:
        return x, weight
    return x.double(), weight.double()


def _three_parts(x: Tensor) -> list[Tensor]:
    """Return three bf16 numbers that add up to x, each bringing 8 more bits of it.

    They are cut off, not rounded by a cast: `torch.compile` computes with what a cast to 16 bits
    was given, so that nothing would be left for the second and third.
    """
    x, parts = x.float(), []
    for _ in range(3):
        parts.append(x.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32))
        x = x - parts[-1]
    return [part.bfloat16() for part in parts]


# fp16 holds 11 bits, but of a small range: rows and columns are scaled by powers of two, so that
# the largest number of each is from 1 up to 2. Of that, steps of 2^-10 are fp16 numbers.
_FP16_STEPS = 2.0**10


def _fp16_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x @ w^T of fp16 and fp32: w is three numbers of fp16, each brings 11 more bits of it.

    Rounded to steps, not by a cast, as `_three_parts` says.
    """
    weight_ED = at_least_fp32(weight_ED)
    size_E1 = _power_of_two(weight_ED, dim=1)
    left_ED, parts = weight_ED / size_E1, []
    for _ in range(3):
        part_ED = (left_ED * _FP16_STEPS).round() / _FP16_STEPS
        parts.append(part_ED.half())
        left_ED = (left_ED - part_ED) * (2 * _FP16_STEPS)  # half a step at most is left
    logits_TP = _mm_fp32(x_TD, torch.cat(parts).T)
    first, second, third = logits_TP.view(x_TD.shape[0], 3, weight_ED.shape[0]).unbind(dim=1)
    return (first + (second + third / (2 * _FP16_STEPS)) / (2 * _FP16_STEPS)) * size_E1.T


def _fp16_grad_x(grad_TE: Tensor, weight_ED: Tensor) -> Tensor:
    """Gradient of the tokens, fp32: both factors rounded to 11 bits."""
    weight_ED = at_least_fp32(weight_ED)
    size_E1 = _power_of_two(weight_ED, dim=1)
    grad_TE = grad_TE * size_E1.T
    size_T1 = _power_of_two(grad_TE, dim=1)
    return _mm_fp32((grad_TE / size_T1).half(), (weight_ED / size_E1).half()) * size_T1


def _fp16_grad_weight(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """Gradient of the weight, fp32: of logits' gradients rounded to 11 bits."""
    size_1E = _power_of_two(grad_TE, dim=0)
    return _mm_fp32((grad_TE / size_1E).half().T, x_TD) * size_1E.T


def _power_of_two(x: Tensor, dim: int) -> Tensor:
    """The power of two at or below the largest of x along a dimension; of next to nothing 2^-100.

    The bits of an fp32 number's exponent alone: dividing by it is exact.
    """
    if x.shape[dim] == 0:
        return x.new_ones([1 if i == dim else size for i, size in enumerate(x.shape)])
    largest = x.abs().amax(dim, keepdim=True).clamp(min=2.0**-100)
    return largest.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Product of matrices of 16 bits, added up and returned in fp32."""
    if _has_units(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
