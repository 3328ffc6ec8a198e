"""Launches of ``mb_kernels.grouped_gemm``'s two products, and what other ops use of them."""

from torch import Tensor

from mb_kernels.grouped_gemm.forward import rows_tile as rows_tile
from mb_kernels.grouped_gemm.forward import rows_times_weights as rows_times_weights
from mb_kernels.grouped_gemm.schedule import schedule as schedule
from mb_kernels.grouped_gemm.weight_grad import outer as outer
from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.descriptors import operand
from mb_kernels.runtime.plan import plan_of


def grouped_gemm(x: Tensor, w: Tensor, offsets: Tensor, transpose_weight: bool) -> Tensor:
    columns = w.shape[1 if transpose_weight else 2]
    if x.numel() == 0 or w.numel() == 0:
        return x.new_zeros((x.shape[0], columns))
    tile = rows_tile(plan_of(x), x.shape[0], w.shape[0], transpose_weight=transpose_weight)
    return rows_times_weights(
        operand(x),
        operand(w),
        schedule(offsets, x.shape[0], tile.block_m),
        transpose_weight=transpose_weight,
        tile=tile,
        fill_dropped=True,
    )


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    require_countable("rows", a.shape[0])
    if a.numel() == 0 or b.numel() == 0 or offsets.shape[0] == 1:
        return a.new_zeros((offsets.shape[0] - 1, a.shape[1], b.shape[1]))
    return outer(operand(a), operand(b), offsets)
