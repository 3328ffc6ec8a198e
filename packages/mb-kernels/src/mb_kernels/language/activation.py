"""The activations of ``mb_kernels.activation`` inside kernels, in fp32.

An epilogue runs them on every element while the matrix units wait, so instructions count: with PTX
the reciprocal and the exponential are single approximate instructions (2 ulp, denormals flushed),
where the portable form spends four to eight more on denormals and range.
"""

import triton
import triton.language as tl

_PORTABLE = tl.constexpr(False)


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
def up_factor(up, BASE: tl.constexpr):
    """What BASE(gate) is multiplied by in a GLU."""
    if BASE == "clamped_swish":
        return tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:
        return up


@triton.jit
def up_gradient(d_factor, up, BASE: tl.constexpr):
    """The gradient of up, given that of ``up_factor``."""
    if BASE == "clamped_swish":
        return tl.where(tl.abs(up) <= 7.0, d_factor, 0.0)
    else:
        return d_factor


@triton.jit
def activate(z, BASE: tl.constexpr, PTX: tl.constexpr = _PORTABLE):
    """The plain function named BASE of z."""
    if BASE == "silu":
        return z * _sigmoid(z, PTX)
    elif BASE == "gelu":
        tail, _ = _normal(z, PTX)
        return tl.maximum(z, 0.0) - tl.abs(z) * tail
    elif BASE == "gelu_tanh":
        return 0.5 * z * (1 + _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z), PTX))
    elif BASE == "relu":
        return tl.maximum(z, 0.0)
    elif BASE == "clamped_swish":
        z = tl.minimum(z, 7.0)
        return z * _sigmoid(1.702 * z, PTX)
    else:
        tl.static_assert(BASE == "squared_relu")
        positive = tl.maximum(z, 0.0)
        return positive * positive


@triton.jit
def activate_with_derivative(z, BASE: tl.constexpr, PTX: tl.constexpr = _PORTABLE):
    """BASE(z) and its derivative, sharing what they have in common."""
    if BASE == "silu":
        sigmoid = _sigmoid(z, PTX)
        value = z * sigmoid
        return value, sigmoid + value * (1 - sigmoid)
    elif BASE == "gelu":
        tail, gauss = _normal(z, PTX)
        cdf = tl.where(z >= 0, 1 - tail, tail)
        return z * cdf, cdf + z * 0.3989422804014327 * gauss
    elif BASE == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (z + 0.044715 * z * z * z), PTX)
        slope = 0.7978845608028654 * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope
    elif BASE == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    elif BASE == "clamped_swish":
        clamped = tl.minimum(z, 7.0)
        sigmoid = _sigmoid(1.702 * clamped, PTX)
        value = clamped * sigmoid
        # In this form, for the sake of registers.
        return value, tl.where(z <= 7.0, sigmoid, 0.0) * (1.0 + 1.702 * (clamped - value))
    else:
        tl.static_assert(BASE == "squared_relu")
        # From the slope, for the sake of registers: squaring the maximum spills on Hopper.
        slope = 2 * tl.maximum(z, 0.0)
        return 0.25 * slope * slope, slope
