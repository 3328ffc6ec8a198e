"""Kernels of ``mb_kernels.permute``: bound by memory, one pass over each row.

There may be more rows than slots: a row whose order is -1 is padding, and stays zero.

Letters: T tokens, D hidden, K top-k, N = T·K rows, E1 = E + 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mb_kernels.language.memory import home_rows, load_picked, store_picked
from mb_kernels.runtime.launch import cdiv, launch, power_of_two


@triton.jit
def gather_kernel(
    x_ptr,  # [T, D]
    order_ptr,  # [N] int32
    last_offset_ptr,  # number of rows that some expert computes
    rows_ptr,  # [N, D]
    rows,
    D,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tl.load(order_ptr + r, mask=r < rows, other=-1)
    token = slot // TOP_K
    taken = (r < tl.load(last_offset_ptr)) & (slot >= 0)
    value = load_picked(x_ptr, token, taken, d, D)
    store_picked(rows_ptr, value, r, r < rows, d, D)


@triton.jit
def spread_kernel(
    x_ptr,  # [T, D]
    inverse_ptr,  # [N] int32
    rows_ptr,  # [N, D]
    tokens,
    D,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = t < tokens
    taken = live
    if TOP_K == 1:  # tokens of no expert here are not read: over two ranks that is half of all
        taken &= tl.load(inverse_ptr + t, mask=live, other=-1) >= 0
    x = load_picked(x_ptr, t, taken, d, D)
    for k in range(TOP_K):
        row = tl.load(inverse_ptr + t.to(tl.int64) * TOP_K + k, mask=live, other=-1)
        store_picked(rows_ptr, x, row, row >= 0, d, D)


@triton.jit
def combine_fwd_kernel(
    rows_ptr,  # [N, D]
    inverse_ptr,  # [N] int32
    weights_ptr,  # [T, K], or None for 1
    y_ptr,  # [T, D]
    home_ptr,  # int64 [P]: where each rank's tokens go instead, if they have a row; or None
    tokens,
    region,  # tokens of a rank
    D,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if home_ptr is None:
        t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        live = t < tokens
    else:  # programs take the ranks in turn, which keeps all links busy all the time
        ranks = tokens // region
        i = tl.program_id(0) // ranks * BLOCK_T + tl.arange(0, BLOCK_T)
        t = tl.program_id(0) % ranks * region + i
        live = i < region
    reached = t < 0
    slot = t.to(tl.int64) * TOP_K
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in range(TOP_K):
        row = tl.load(inverse_ptr + slot + k, mask=live, other=-1)
        reached |= row >= 0
        value = load_picked(rows_ptr, row, row >= 0, d, D).to(tl.float32)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + slot + k, mask=live, other=0.0).to(tl.float32)
            value *= tl.where(row >= 0, weight, 0.0)[:, None]  # that of a dropped slot may be NaN
        acc += value
    if home_ptr is None:
        store_picked(y_ptr, acc, t, live, d, D)
    else:
        at = home_rows(y_ptr, home_ptr, region, t, reached, D) + d[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=reached[:, None] & (d < D)[None, :])


@triton.jit
def combine_bwd_kernel(
    dy_ptr,  # [T, D]
    rows_ptr,  # [N, D]
    order_ptr,  # [N] int32
    last_offset_ptr,  # number of rows that some expert computes
    weights_ptr,  # [T, K]
    d_rows_ptr,  # [N, D]
    d_weights_ptr,  # [T, K]
    rows,
    D,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = r < rows
    slot = tl.load(order_ptr + r, mask=live, other=-1)
    taken = (r < tl.load(last_offset_ptr)) & (slot >= 0)
    s = tl.load(weights_ptr + slot, mask=taken, other=0.0).to(tl.float32)
    # Rows located once: in the loop, as load_picked has it, they cost 8 registers.
    dy_row = dy_ptr + (slot // TOP_K).to(tl.int64)[:, None] * D
    row = r.to(tl.int64)[:, None] * D
    dot = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = (d < D)[None, :]
        mask = taken[:, None] & inside
        dy = tl.load(dy_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(rows_ptr + row + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(dy * y, 1)
        d_row = (dy * s[:, None]).to(d_rows_ptr.dtype.element_ty)
        tl.store(d_rows_ptr + row + d[None, :], d_row, mask=live[:, None] & inside)
    tl.store(d_weights_ptr + slot, dot.to(d_weights_ptr.dtype.element_ty), mask=slot >= 0)


@triton.jit
def sum_partials_kernel(
    partials_ptr,  # [parts, N] fp32, by row
    order_ptr,  # [N] int32
    offsets_ptr,  # [E + 1] int32
    out_ptr,  # [N], by slot
    rows,
    parts,
    E: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two from parts on
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    slot = tl.load(order_ptr + r, mask=r < rows, other=0)
    taken = r < tl.load(offsets_ptr + E)  # a dropped slot sums no partials: zero
    partial = partials_ptr + part.to(tl.int64)[:, None] * rows + r[None, :]
    values = tl.load(partial, mask=(part < parts)[:, None] & taken[None, :], other=0.0)
    tl.store(out_ptr + slot, tl.sum(values, 0).to(out_ptr.dtype.element_ty), mask=r < rows)


# Elements of one program of ``combine``. Its loads of top_k rows wait for one another, so that many
# small programs are better. One H200, 4096 against 1024: 337, 281 us (OLMoE), 97, 79 (with 8192
# tokens), 62, 55 (Mixtral). ``spread`` gains little, 333, 327 us: writing its rows alone takes 320.
_COMBINED = 1024


def _blocks(columns: int, elements: int = 4096) -> tuple[int, int]:
    """Rows and columns of one program; with 128 threads, 16 or more bytes per thread and row."""
    block_d = min(power_of_two(columns), 1024)
    return max(elements // block_d, 1), block_d


def gather(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    rows, columns = order.shape[0], x.shape[1]
    out = x.new_empty((rows, columns))
    if out.numel() == 0:
        return out
    block_r, block_d = _blocks(columns)
    launch(
        gather_kernel,
        (cdiv(rows, block_r), cdiv(columns, block_d)),
        x,
        order,
        offsets[-1:],
        out,
        rows,
        columns,
        TOP_K=top_k,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return out


def spread(x: Tensor, inverse: Tensor, top_k: int, count: int) -> Tensor:
    """Tokens [T, D] copied to their rows [count, D]; rows of dropped slots are left unwritten.

    Reads each token once, where ``gather`` reads it top_k times.
    """
    tokens, columns = x.shape
    rows = x.new_empty((count, columns))
    block_t, block_d = _blocks(columns)
    launch(
        spread_kernel,
        (cdiv(tokens, block_t), cdiv(columns, block_d)),
        x,
        inverse,
        rows,
        tokens,
        columns,
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
    )
    return rows


def combine(
    rows: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    top_k: int,
    home: Tensor | None = None,
) -> Tensor:
    """Each token's rows, weighted, summed.

    ``home``, int64 [P]: the tokens belong to P ranks, T / P to each, and those that have rows are
    stored at these addresses. Then what is returned means nothing.
    """
    tokens, columns = inverse.shape[0] // top_k, rows.shape[1]
    y = rows.new_empty((tokens, columns) if home is None else 0)
    if tokens * columns == 0:
        return y
    ranks = 1 if home is None else home.shape[0]
    block_t, block_d = _blocks(columns, _COMBINED)
    launch(
        combine_fwd_kernel,
        (cdiv(tokens // ranks, block_t) * ranks, cdiv(columns, block_d)),
        rows,
        inverse,
        weights,
        y,
        home,
        tokens,
        tokens // ranks,
        columns,
        TOP_K=top_k,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
    )
    return y


def combine_backward(
    dy: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    count, columns = rows.shape
    d_rows = torch.empty_like(rows)
    every = columns > 0 and count >= weights.numel()  # slot has a row that writes its gradient
    d_weights = torch.empty_like(weights) if every else torch.zeros_like(weights)
    if d_rows.numel() == 0:
        return d_rows, d_weights
    block_r, block_d = _blocks(columns)
    launch(
        combine_bwd_kernel,
        (cdiv(count, block_r),),
        dy,
        rows,
        order,
        offsets[-1:],
        weights,
        d_rows,
        d_weights,
        count,
        columns,
        TOP_K=weights.shape[1],
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return d_rows, d_weights


def sum_partials(partials: Tensor, order: Tensor, offsets: Tensor, like: Tensor) -> Tensor:
    """Partials [parts, N] by row, summed over the parts and put in slot order, like ``like``."""
    parts, rows = partials.shape
    out = torch.empty_like(like) if rows == like.numel() else torch.zeros_like(like)
    block = max(4096 // power_of_two(parts), 32)
    launch(
        sum_partials_kernel,
        (cdiv(rows, block),),
        partials,
        order,
        offsets,
        out,
        rows,
        parts,
        E=offsets.shape[0] - 1,
        PARTS=power_of_two(parts),
        BLOCK=block,
    )
    return out
