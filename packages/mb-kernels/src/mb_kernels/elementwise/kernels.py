"""Kernels of ``mb_kernels.elementwise``: a program takes a stretch of one row.

Letters: R rows, L columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.activation import gate_and_up, is_glu, parse
from mb_kernels.language.activation import (
    activate,
    activate_with_derivative,
    constexpr,
    up_factor,
    up_gradient,
)
from mb_kernels.runtime.launch import cdiv, launch, power_of_two

# Of a program: 32 per thread of 4 warps, in 16-byte loads.
_ELEMENTS = 4096


@triton.jit
def activation_kernel(
    gate_ptr,  # [R, L], rows ``stride`` apart, columns STEP
    up_ptr,  # likewise, or None
    d_a_ptr,  # [R, L], and the kernel is the backward; or None
    out_ptr,  # a [R, L]; in the backward the gradient of gate, strides like gate's
    d_up_ptr,  # like the gradient of gate, or None
    stride,
    L,
    ACTIVATION: constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < L
    at = row * stride + i * STEP
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    if d_a_ptr is None:
        a = activate(gate, ACTIVATION)
        if up_ptr is not None:
            up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
            a *= up_factor(up, ACTIVATION)
        tl.store(out_ptr + row * L + i, a.to(kind), mask=inside)
    else:
        d_a = tl.load(d_a_ptr + row * L + i, mask=inside, other=0.0).to(tl.float32)
        value, slope = activate_with_derivative(gate, ACTIVATION)
        if up_ptr is not None:
            up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
            factor = up_factor(up, ACTIVATION)
            d_up = up_gradient(d_a * value, up, factor, ACTIVATION)
            tl.store(d_up_ptr + at, d_up.to(kind), mask=inside)
            d_a *= factor
        tl.store(out_ptr + at, (d_a * slope).to(kind), mask=inside)


def activation(h: Tensor, activation: str) -> Tensor:
    out = h.new_empty((h.shape[0], h.shape[1] // (2 if is_glu(activation) else 1)))
    _launch(*_parts(h, activation), None, out, None, activation)
    return out


def activation_backward(d_a: Tensor, h: Tensor, activation: str) -> Tensor:
    d_h = h.new_empty(h.shape)
    _launch(*_parts(h, activation), d_a, *_parts(d_h, activation), activation)
    return d_h


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = gate.new_empty(gate.shape)
    _launch(gate, up, None, out, None, activation)
    return out


def gated_activation_backward(
    d_a: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(gate, up, d_a, d_gate, d_up, activation)
    return d_gate, d_up


def _parts(h: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Gate and up of [R, 2L], or all of [R, L]."""
    kind = parse(activation)
    return gate_and_up(h, kind) if kind.gated else (h, None)


def _launch(
    gate: Tensor,
    up: Tensor | None,
    d_a: Tensor | None,
    out: Tensor,
    d_up: Tensor | None,
    activation: str,
) -> None:
    rows, columns = gate.shape
    if gate.numel():
        block = min(power_of_two(columns), _ELEMENTS)
        launch(
            activation_kernel,
            (rows, cdiv(columns, block)),
            *(gate, up, d_a, out, d_up, gate.stride(0), columns),
            ACTIVATION=parse(activation),
            STEP=gate.stride(1),
            BLOCK=block,
        )
