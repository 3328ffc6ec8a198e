"""The activations of ``mb_kernels.activation`` inside kernels, in fp32.

An epilogue runs them on every element while the matrix units wait, so every instruction counts.
With PTX the reciprocal and the exponential are single approximate instructions (2 ulp, denormals
flushed). The portable operations take four to eight more, for denormals and range.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from mb_kernels.activation import Activation

    constexpr = Activation
else:  # Triton's; its interpreter compares the annotation as text, so the name must be this one
    from triton.language import constexpr

_PORTABLE = tl.constexpr(False)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    if PTX:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def _exp2(x, PTX: tl.constexpr):
    if PTX:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def _sigmoid(z, PTX: tl.constexpr):
    return _reciprocal(1.0 + _exp2(-1.4426950408889634 * z, PTX), PTX)


@triton.jit
def _tanh(z, PTX: tl.constexpr):
    return 2 * _sigmoid(2 * z, PTX) - 1


@triton.jit
def _normal(z, PTX: tl.constexpr):
    """Mass of the standard normal beyond ``abs(z)``, within 1.5e-7, and exp(-z²/2).

    Abramowitz and Stegun 7.1.26 for erfc, which shares its exponential with the density; halved.
    """
    t = _reciprocal(1.0 + 0.23164189 * tl.abs(z), PTX)  # 0.3275911 / sqrt(2)
    poly = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
    poly = t * (0.127414796 + t * (-0.142248368 + t * poly))
    gauss = _exp2(-0.7213475204444817 * z * z, PTX)
    return poly * gauss, gauss


@triton.jit
def _at_most(z, LIMIT: tl.constexpr):
    return tl.minimum(z, LIMIT, propagate_nan=tl.PropagateNan.ALL) if LIMIT < _INFINITY else z


@triton.jit
def _positive(z):
    return tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def up_factor(up, KIND: constexpr, PTX: tl.constexpr = _PORTABLE):
    """What the activated gate of a GLU is multiplied by."""
    if KIND.limit < _INFINITY:
        up = tl.maximum(up, -KIND.limit, propagate_nan=tl.PropagateNan.ALL)
        up = _at_most(up, KIND.limit)
    if KIND.up_cap < _INFINITY:
        up = KIND.up_cap * _tanh(up * (1 / KIND.up_cap), PTX)
    return up + KIND.offset if KIND.offset != 0 else up


@triton.jit
def up_gradient(d_factor, up, factor, KIND: constexpr):
    """The gradient of up, given that of ``factor``, its ``up_factor``."""
    if KIND.limit < _INFINITY:
        return tl.where(tl.abs(up) <= KIND.limit, d_factor, 0.0)
    elif KIND.up_cap < _INFINITY:
        tanh = (factor - KIND.offset) * (1 / KIND.up_cap)
        return d_factor * (1 - tanh * tanh)
    else:
        return d_factor


@triton.jit
def activate(z, KIND: constexpr, PTX: tl.constexpr = _PORTABLE):
    """The plain function of KIND, an ``mb_kernels.activation.Activation``, of z."""
    z = _at_most(z, KIND.limit)
    if KIND.gate_cap < _INFINITY:
        return KIND.gate_cap * _tanh(z * (1 / KIND.gate_cap), PTX) * _sigmoid(z, PTX)
    elif KIND.function == "silu":
        return z * _sigmoid(z if KIND.alpha == 1 else KIND.alpha * z, PTX)
    elif KIND.function == "gelu":
        tail, _ = _normal(z, PTX)
        return tl.maximum(z, 0.0) - tl.abs(z) * tail
    elif KIND.function == "gelu_tanh":
        return 0.5 * z * (1 + _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z), PTX))
    elif KIND.function == "relu":
        return _positive(z)
    else:
        tl.static_assert(KIND.function == "squared_relu")
        positive = _positive(z)
        return positive * positive


@triton.jit
def activate_with_derivative(z, KIND: constexpr, PTX: tl.constexpr = _PORTABLE):
    """The plain function of KIND and its derivative, sharing what they have in common."""
    if KIND.limit < _INFINITY and KIND.function == "silu":
        clamped = _at_most(z, KIND.limit)
        sigmoid = _sigmoid(clamped if KIND.alpha == 1 else KIND.alpha * clamped, PTX)
        value = clamped * sigmoid
        # In this form, for the sake of registers.
        slope = tl.where(z <= KIND.limit, sigmoid, 0.0) * (1.0 + KIND.alpha * (clamped - value))
        return value, slope
    elif KIND.limit < _INFINITY:
        value, slope = _with_derivative(_at_most(z, KIND.limit), KIND, PTX)
        return value, tl.where(z <= KIND.limit, slope, 0.0)
    else:
        return _with_derivative(z, KIND, PTX)


@triton.jit
def _with_derivative(z, KIND: constexpr, PTX: tl.constexpr):
    if KIND.gate_cap < _INFINITY:
        tanh = _tanh(z * (1 / KIND.gate_cap), PTX)
        sigmoid = _sigmoid(z, PTX)
        value = KIND.gate_cap * tanh * sigmoid
        return value, sigmoid * (1 - tanh * tanh) + value * (1 - sigmoid)
    elif KIND.function == "silu":
        sigmoid = _sigmoid(z if KIND.alpha == 1 else KIND.alpha * z, PTX)
        value = z * sigmoid
        if KIND.alpha == 1:
            return value, sigmoid + value * (1 - sigmoid)
        else:
            return value, sigmoid + KIND.alpha * value * (1 - sigmoid)
    elif KIND.function == "gelu":
        tail, gauss = _normal(z, PTX)
        cdf = tl.where(z >= 0, 1 - tail, tail)
        return z * cdf, cdf + z * 0.3989422804014327 * gauss
    elif KIND.function == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z), PTX)
        slope = 0.7978845608028654 * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope
    elif KIND.function == "relu":
        return _positive(z), tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(KIND.function == "squared_relu")
        # From the slope, for the sake of registers: squaring the maximum spills on Hopper.
        slope = 2 * _positive(z)
        return 0.25 * slope * slope, slope
