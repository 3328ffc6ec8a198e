"""Rows sorted by expert times per-expert weights, counts on the device.

Three products: rows × weight, its gradient for the rows (the same product with the weight
transposed), and the gradient for the weights, whose contraction runs over a ragged number of rows
(``grouped_outer``; an empty expert gets zeros).

Letters: N rows, K contraction, M output columns, E experts, E1 = E + 1.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.exporting import transforms_active
from mb_kernels.grouped_gemm.reference import grouped_gemm as grouped_gemm_reference
from mb_kernels.grouped_gemm.reference import grouped_outer as grouped_outer_reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.widths import cut, lacking, widened


def grouped_gemm(
    x_NK: Tensor, w_EMK: Tensor, offsets_E1: Tensor, *, transpose_weight: bool = True
) -> Tensor:
    """Multiply each expert's rows by its weight.

    Args:
        x_NK: [N, K]; fp32, bf16 or fp16. On a GPU a K or M that is no multiple of 16 costs a wider
            copy of the weights.
        w_EMK: [E, M, K], or [E, K, M] with ``transpose_weight=False``; dtype of x_NK.
        offsets_E1: [E + 1] int32 or int64; expert e owns rows offsets[e] to offsets[e + 1].
        transpose_weight: row r of expert e becomes ``x_r @ w_e^T`` (True) or ``x_r @ w_e``.

    Returns:
        [N, M] in the dtype of x_NK; rows from offsets_E1[-1] on are zero. Differentiable in
        x_NK and w_EMK.

    Raises:
        ValueError: shapes, dtypes or devices do not match; on a GPU a matrix of 2**31 elements, or
            of 2**24 rows or columns, or 2**30 rows of x_NK.
    """
    checks.require_same("x_NK", x_NK, w=w_EMK)
    checks.require_indices("x_NK", x_NK, offsets_E1=offsets_E1)
    contraction = 2 if transpose_weight else 1
    if x_NK.ndim != 2 or w_EMK.ndim != 3 or w_EMK.shape[contraction] != x_NK.shape[1]:
        layout = "[E, M, K]" if transpose_weight else "[E, K, M]"
        raise ValueError(
            f"w: expected {layout} with the K of x_NK {tuple(x_NK.shape)}; got "
            f"{tuple(w_EMK.shape)}. transpose_weight={not transpose_weight} takes the other layout."
        )
    if offsets_E1.shape != (w_EMK.shape[0] + 1,):
        raise ValueError(
            f"offsets_E1: expected [{w_EMK.shape[0] + 1}], one more than the experts of w; got "
            f"{tuple(offsets_E1.shape)}."
        )
    return product("w", x_NK, w_EMK, offsets_E1, transpose_weight=transpose_weight)


def check_sizes(name: str, sizes_E: Tensor, experts: int | None, rows: int) -> None:
    """ValueError unless ``sizes_E`` can be the numbers of rows of ``experts`` experts (None: any).

    Values are checked on the CPU; under the compiler and vmap, and of fake tensors, there are none.
    """
    checks.require_dense(name, sizes_E)
    if sizes_E.ndim != 1 or sizes_E.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: expected int32 or int64 [E], the rows of each expert; got "
            f"{sizes_E.dtype} {tuple(sizes_E.shape)}."
        )
    if experts is not None and sizes_E.shape[0] != experts:
        raise ValueError(
            f"{name}: expected [{experts}], a size for each expert's matrix; got "
            f"{tuple(sizes_E.shape)}."
        )
    if sizes_E.device.type != "cpu" or type(sizes_E) is not Tensor:
        return
    if not torch.compiler.is_compiling() and not transforms_active():
        sizes = sizes_E.tolist()
        if sum(sizes) > rows or min(sizes, default=0) < 0:
            raise ValueError(
                f"{name}: expected sizes of at least 0 that add up to at most {rows}, the number "
                f"of rows; got {sizes}."
            )


def offsets_of(batch_sizes: Tensor) -> Tensor:
    """[E + 1] int32: expert e owns rows offsets[e] to offsets[e + 1]."""
    ends = torch.cumsum(batch_sizes, 0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def product(
    name: str, x_NK: Tensor, w_EMK: Tensor, offsets_E1: Tensor, *, transpose_weight: bool
) -> Tensor:
    """``grouped_gemm`` of checked arguments; ``name``: what the caller calls the weights."""
    columns = w_EMK.shape[1 if transpose_weight else 2]
    more_K, more_M = lacking(x_NK, x_NK.shape[1]), lacking(x_NK, columns)
    w = widened(w_EMK, *((more_K, more_M) if transpose_weight else (more_M, more_K)))
    checks.require_addressable(name, w, w.shape)
    (offsets,) = checks.int32(offsets_E1)
    y_NM = torch.ops.mb.grouped_gemm(widened(x_NK, more_K), w, offsets, transpose_weight)
    return cut(y_NM, columns)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offsets, ctx.transpose_weight = inputs
    ctx.save_for_backward(x, w, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.mb.grouped_gemm(dy, w, offsets, not ctx.transpose_weight)
    if ctx.needs_input_grad[1]:
        dw = torch.ops.mb.grouped_outer(*((dy, x) if ctx.transpose_weight else (x, dy)), offsets)
    return dx, dw, None, None


def _outer_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _outer_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b, offsets = ctx.saved_tensors
    da = torch.ops.mb.grouped_gemm(b, d_out, offsets, True)
    return da, torch.ops.mb.grouped_gemm(a, d_out, offsets, False), None


def _flops(x_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape[0] * w_shape[1] * w_shape[2]


def _outer_flops(a_shape: Any, b_shape: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


registration.register(
    "grouped_gemm(Tensor x, Tensor w, Tensor offsets, bool transpose_weight) -> Tensor",
    reference=lambda x, w, offsets, transpose_weight: grouped_gemm_reference(
        x, w, offsets, transpose_weight=transpose_weight
    ),
    kernels="mb_kernels.grouped_gemm.kernels",
    fake=lambda x, w, offsets, transpose_weight: x.new_empty(
        (x.shape[0], w.shape[1 if transpose_weight else 2])
    ),
    flops=_flops,
    setup_context=_setup,
    backward=_backward,
    differentiable_twice=True,
    debug_check=lambda x, w, offsets, _: checks.debug_offsets(offsets, x.shape[0]),
)
registration.register(
    "grouped_outer(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    reference=grouped_outer_reference,
    kernels="mb_kernels.grouped_gemm.kernels",
    fake=lambda a, b, offsets: a.new_empty((offsets.shape[0] - 1, a.shape[1], b.shape[1])),
    flops=_outer_flops,
    setup_context=_outer_setup,
    backward=_outer_backward,
    differentiable_twice=True,
    debug_check=lambda a, b, offsets: checks.debug_offsets(offsets, a.shape[0]),
)
