"""The activations an expert may use: one table of names, and their derivatives in plain PyTorch.

A gated activation (GLU) takes ``h_N2F``, gate over up, and returns ``act(gate) * up``; a plain one
maps ``h_NF`` elementwise. "gelu" and "geglu" are the exact erf GELU of Hendrycks & Gimpel
(arXiv:1606.08415), "gelu_tanh" and "geglu_tanh" its tanh approximation; the GLU family is Shazeer's
(arXiv:2002.05202), squared ReLU is Primer's (arXiv:2109.08668). "swigluoai" is GPT-OSS's: with
gate at most 7 and up within ±7, ``gate · sigmoid(1.702 gate) · (up + 1)``.

Letters: N rows, F expert ffn width.
"""

import difflib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

# The function applied to the gate (GLU) or to the whole pre-activation (plain).
GLU_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "swigluoai": "clamped_swish",
}
PLAIN_ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu", "squared_relu")

_LIMIT, _SHARPNESS = 7.0, 1.702  # of swigluoai


def is_glu(name: str) -> bool:
    """True if ``name`` is a gated activation, whose w1 is [E, 2F, D]; ValueError if unknown."""
    if name in GLU_ACTIVATIONS:
        return True
    if name in PLAIN_ACTIVATIONS:
        return False
    known = (*GLU_ACTIVATIONS, *PLAIN_ACTIVATIONS)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
    raise ValueError(f"activation: expected one of {', '.join(known)}; got {name!r}. Use {near!r}?")


def base_function(name: str) -> str:
    """The plain function inside ``name``: "silu" for "swiglu", "gelu" for "gelu"."""
    return GLU_ACTIVATIONS[name] if is_glu(name) else name


def activate(h: Tensor, name: str) -> Tensor:
    """Apply activation ``name`` to h [..., F], or [..., 2F] for a GLU: a [..., F]."""
    if is_glu(name):
        gate, up = h.chunk(2, dim=-1)
        return _plain(gate, GLU_ACTIVATIONS[name]) * _factor(up, name)
    return _plain(h, name)


def activate_backward(d_a: Tensor, h: Tensor, name: str) -> Tensor:
    """Gradient of ``activate`` with respect to h, in h's shape, given d_a [..., F]."""
    if is_glu(name):
        gate, up = h.chunk(2, dim=-1)
        base = GLU_ACTIVATIONS[name]
        d_up = d_a * _plain(gate, base)
        if name == "swigluoai":
            d_up = torch.where(up.abs() <= _LIMIT, d_up, 0)
        return torch.cat([d_a * _factor(up, name) * _derivative(gate, base), d_up], dim=-1)
    return d_a * _derivative(h, name)


def _factor(up: Tensor, name: str) -> Tensor:
    return up.clamp(-_LIMIT, _LIMIT) + 1 if name == "swigluoai" else up


def _plain(z: Tensor, base: str) -> Tensor:
    if base == "clamped_swish":
        z = z.clamp(max=_LIMIT)
        return z * torch.sigmoid(_SHARPNESS * z)
    if base == "silu":
        return F.silu(z)
    if base == "gelu":
        return F.gelu(z)
    if base == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    relu = F.relu(z)
    return relu * relu if base == "squared_relu" else relu


def _derivative(z: Tensor, base: str) -> Tensor:
    if base == "clamped_swish":
        sigmoid = torch.sigmoid(_SHARPNESS * z)
        slope = sigmoid * (1 + _SHARPNESS * z * (1 - sigmoid))
        return torch.where(z <= _LIMIT, slope, 0)
    if base == "silu":
        sigmoid = torch.sigmoid(z)
        return sigmoid * (1 + z * (1 - sigmoid))
    if base == "gelu":
        density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * density
    if base == "gelu_tanh":
        scale = math.sqrt(2 / math.pi)
        tanh = torch.tanh(scale * (z + 0.044715 * z**3))
        return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * scale * (1 + 0.134145 * z * z)
    relu = F.relu(z)
    return 2 * relu if base == "squared_relu" else (z > 0).to(z.dtype)
