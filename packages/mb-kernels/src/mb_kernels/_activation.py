"""The activations of ``mb_kernels.activation`` inside kernels, in fp32."""

import triton
import triton.language as tl


@triton.jit
def tanh(z):
    return 2 * tl.sigmoid(2 * z) - 1


@triton.jit
def _normal(z):
    """Distribution and density of the standard normal at z; the first within 1.5e-7.

    Abramowitz and Stegun 7.1.26 for erf: it shares its exponential with the density and needs half
    the registers and instructions of tl.erf, whose epilogue cost as much as the product before it.
    """
    t = 1 / (1 + 0.23164189 * tl.abs(z))  # 0.3275911 / sqrt(2)
    poly = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    poly = t * (0.254829592 + t * (-0.284496736 + t * poly))
    gauss = tl.exp(-0.5 * z * z)
    tail = 0.5 * poly * gauss
    return tl.where(z >= 0, 1 - tail, tail), 0.3989422804014327 * gauss


@triton.jit
def activate(z, BASE: tl.constexpr):
    """The plain function named BASE of z."""
    if BASE == "silu":
        return z * tl.sigmoid(z)
    elif BASE == "gelu":
        cdf, _ = _normal(z)
        return z * cdf
    elif BASE == "gelu_tanh":
        return 0.5 * z * (1 + tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)))
    elif BASE == "relu":
        return tl.maximum(z, 0.0)
    else:
        tl.static_assert(BASE == "squared_relu")
        positive = tl.maximum(z, 0.0)
        return positive * positive


@triton.jit
def activate_with_derivative(z, BASE: tl.constexpr):
    """BASE(z) and its derivative, sharing what they have in common."""
    if BASE == "silu":
        sigmoid = tl.sigmoid(z)
        value = z * sigmoid
        return value, sigmoid + value * (1 - sigmoid)
    elif BASE == "gelu":
        cdf, density = _normal(z)
        return z * cdf, cdf + z * density
    elif BASE == "gelu_tanh":
        t = tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))
        slope = 0.7978845608028654 * (1 + 0.134145 * z * z)
        return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * slope
    elif BASE == "relu":
        return tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(BASE == "squared_relu")
        positive = tl.maximum(z, 0.0)
        return positive * positive, 2 * positive
