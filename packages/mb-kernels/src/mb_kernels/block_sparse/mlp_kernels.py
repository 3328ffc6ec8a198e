"""Triton kernels of ``block_sparse.mlp``: indices of the sparse matrix, and its activation.

Letters: B = 128, E experts, R block rows, N routed rows, L elements of a block row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.activation import base_function, is_glu
from mb_kernels.block_sparse.reference import BLOCK
from mb_kernels.language.activation import activate, activate_with_derivative
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.targets.table import GateCase, Target

# Of a program: 32 per thread of 4 warps, in 16-byte loads.
_ELEMENTS = 4096


@triton.jit
def pad_indices_kernel(
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    order_out_ptr,
    inverse_out_ptr,
    offsets_out_ptr,
    N,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    B: tl.constexpr,
):
    """Program r fills the rows of block row r: an expert's, or dropped slots."""
    r = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    count = tl.load(offsets_ptr + e + 1, mask=e < E, other=0) - start
    blocks = (count + B - 1) // B
    last = tl.cumsum(blocks, axis=0)  # one past the last block row of each expert
    used = tl.sum(blocks)
    mine = (last > r) & (last - blocks <= r)
    if r == 0:
        tl.store(offsets_out_ptr + e + 1, last * B, mask=e < E)
        tl.store(offsets_out_ptr, 0)

    # Where this block row starts among the rows of its expert, and where those start in order_ptr.
    kept = tl.load(offsets_ptr + E)
    first = tl.where(r < used, tl.sum(tl.where(mine, last - blocks, 0)), used)
    source = tl.where(r < used, tl.sum(tl.where(mine, start, 0)), kept)
    size = tl.where(r < used, tl.sum(tl.where(mine, count, 0)), N - kept)
    row = r * B + tl.arange(0, B)
    within = row - first * B
    slot = tl.load(order_ptr + source + within, mask=within < size, other=-1)
    tl.store(order_out_ptr + row, slot)
    tl.store(inverse_out_ptr + slot, tl.where(r < used, row, -1), mask=within < size)


@triton.jit
def topology_indices_kernel(
    starts_ptr,
    row_indices_ptr,
    column_indices_ptr,
    offsets_ptr,
    offsets_t_ptr,
    column_indices_t_ptr,
    block_offsets_t_ptr,
    block_rows,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    B: tl.constexpr,
):
    """Program p writes the blocks of block row p, and the column offsets of expert p."""
    p = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    first = tl.load(starts_ptr + e, mask=e < E, other=0) // B
    last = tl.load(starts_ptr + e + 1, mask=e < E, other=0) // B
    used = tl.load(starts_ptr + E) // B
    j = tl.arange(0, COLUMNS)
    written = j < WIDTH

    if p < block_rows:
        mine = (first <= p) & (p < last)
        expert = tl.sum(tl.where(mine, e, 0))
        expert_first = tl.sum(tl.where(mine, first, 0))
        expert_rows = tl.sum(tl.where(mine, last - first, 0))
        block = p * WIDTH + j
        tl.store(row_indices_ptr + block, tl.zeros_like(j) + p, mask=written)
        column = tl.where(p < used, expert * WIDTH + j, 0)
        tl.store(column_indices_ptr + block, column, mask=written)
        tl.store(offsets_ptr + p, tl.minimum(p, used) * WIDTH)
        in_order = expert_first * WIDTH + j * expert_rows + p - expert_first
        in_order = tl.where(p < used, in_order, block)
        tl.store(column_indices_t_ptr + in_order, tl.zeros_like(j) + p, mask=written)
        tl.store(block_offsets_t_ptr + in_order, block, mask=written)
    if p == block_rows - 1:
        tl.store(offsets_ptr + block_rows, used * WIDTH)
    if p < E:
        mine = e == p
        expert_first = tl.sum(tl.where(mine, first, 0))
        expert_rows = tl.sum(tl.where(mine, last - first, 0))
        offset = expert_first * WIDTH + j * expert_rows
        tl.store(offsets_t_ptr + p * WIDTH + j, offset, mask=written)
    if p == E - 1:
        tl.store(offsets_t_ptr + E * WIDTH, used * WIDTH)


@triton.jit
def activate_kernel(
    h_ptr,  # [R, L], or [R, 2L] gate before up
    d_a_ptr,  # [R, L], with BACKWARD
    out_ptr,  # a [R, L], or the gradient of h
    L,
    GLU: tl.constexpr,
    BACKWARD: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < L
    h_row = row * (2 * L if GLU else L)
    gate = tl.load(h_ptr + h_row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + h_row + L + i, mask=inside, other=0.0).to(tl.float32) if GLU else 1.0
    if not BACKWARD:
        a = activate(gate, BASE) * up
        tl.store(out_ptr + row * L + i, a.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        d_a = tl.load(d_a_ptr + row * L + i, mask=inside, other=0.0).to(tl.float32)
        value, slope = activate_with_derivative(gate, BASE)
        d_gate = (d_a * up * slope).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + h_row + i, d_gate, mask=inside)
        if GLU:
            d_up = (d_a * value).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + h_row + L + i, d_up, mask=inside)


def pad_indices(
    order: Tensor, inverse: Tensor, offsets: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch: one program per block row."""
    experts = offsets.numel() - 1
    padded = order.new_empty(rows), torch.empty_like(inverse), torch.empty_like(offsets)
    if rows == 0:
        padded[2].zero_()
        return padded
    sizes = {"E": experts, "EXPERTS": power_of_two(experts), "B": BLOCK}
    arguments = (order, inverse, offsets, *padded, order.numel())
    launch(pad_indices_kernel, (rows // BLOCK,), *arguments, **sizes)
    return padded


def topology_indices(padded_offsets: Tensor, block_rows: int, width: int) -> tuple[Tensor, ...]:
    """Launch: one program per block row or expert, whichever are more."""
    experts = padded_offsets.numel() - 1
    sizes = (block_rows * width,) * 2 + (block_rows + 1, experts * width + 1)
    sizes += (block_rows * width,) * 2
    out = tuple(padded_offsets.new_empty(size) for size in sizes)
    if block_rows == 0:
        return tuple(t.zero_() for t in out)
    launch(
        topology_indices_kernel,
        (max(block_rows, experts),),
        padded_offsets,
        *out,
        block_rows,
        E=experts,
        EXPERTS=power_of_two(experts),
        WIDTH=width,
        COLUMNS=power_of_two(width),
        B=BLOCK,
    )
    return out


def block_activation(h: Tensor, activation: str) -> Tensor:
    """Launch for h [R, L], or [R, 2L] for a GLU."""
    out = h.new_empty((h.shape[0], h.shape[1] // (2 if is_glu(activation) else 1)))
    _launch_activation(h, None, out, activation)
    return out


def block_activation_backward(d_a: Tensor, h: Tensor, activation: str) -> Tensor:
    """Launch: the gradient of h, given that of the activation [R, L]."""
    d_h = torch.empty_like(h)
    _launch_activation(h, d_a, d_h, activation)
    return d_h


def _launch_activation(h: Tensor, d_a: Tensor | None, out: Tensor, activation: str) -> None:
    elements = h.shape[1] // (2 if is_glu(activation) else 1)
    if out.numel():
        sizes = {"GLU": is_glu(activation), "BACKWARD": d_a is not None}
        base = base_function(activation)
        grid = (h.shape[0], cdiv(elements, _ELEMENTS))
        launch(activate_kernel, grid, h, d_a, out, elements, **sizes, BASE=base, BLOCK=_ELEMENTS)


def gate_cases(target: Target) -> list[GateCase]:
    """The index kernels at 64 experts, and the heaviest activation both ways."""
    indices = ("row_indices", "column_indices", "offsets", "offsets_t", "column_indices_t")
    bins = ("order", "inverse", "offsets", "order_out", "inverse_out", "offsets_out")
    return [
        GateCase(
            name="topology_indices",
            kernel=topology_indices_kernel,
            signature={"starts_ptr": "*i32", **{f"{name}_ptr": "*i32" for name in indices}}
            | {"block_offsets_t_ptr": "*i32", "block_rows": "i32"},
            constexprs={"E": 64, "EXPERTS": 64, "WIDTH": 12, "COLUMNS": 16, "B": BLOCK},
        ),
        GateCase(
            name="pad_indices",
            kernel=pad_indices_kernel,
            signature={**{f"{name}_ptr": "*i32" for name in bins}, "N": "i32"},
            constexprs={"E": 64, "EXPERTS": 64, "B": BLOCK},
        ),
        *(
            GateCase(
                name=f"activate_{name}",
                kernel=activate_kernel,
                signature={"h_ptr": "*bf16", "d_a_ptr": "*bf16", "out_ptr": "*bf16", "L": "i32"},
                constexprs={"GLU": True, "BACKWARD": name == "backward", "BASE": "gelu"}
                | {"BLOCK": _ELEMENTS},
                multiples_of_16=("L",),
            )
            for name in ("forward", "backward")
        ),
    ]
