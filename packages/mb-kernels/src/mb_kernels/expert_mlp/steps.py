"""The expert MLP as a sequence of kernels.

| forward | backward |
|---|---|
| tile schedule, kept for the backward | |
| up: gather (or spread x first), w1, [b1], activation | [up again, to recompute h], spread do |
| down: w2, [b2] | dact: dh, s·a, partials of the weights' gradient; their sum; [of biases' too] |
| combine (K = 1: inside down) | dw2; dX, combine (K = 1: inside dX); [spread x], dw1 |

The forward gathers tokens inside the up-projection. On Hopper, and where the backward needs the
copy too, it copies them to rows first ("spread", which reads each token once). The backward always
works on rows: its products read each row many times, and gathering in the loop of a weight gradient
costs more than the copy (540 against 650 TFLOP/s on an H200).

Weights stored transposed, w1 [E, D, F] and w2 [E, F, D], are read in place: products of the forward
load their blocks as products of the backward do for other weights, and the reverse. For their
gradients the two operands are exchanged.

With ``fp8`` both operands of up, down, dact and dX are codes of ``to_float8``. Tokens are rounded
before they are copied to their rows, and all weights such that both operands have the contraction
last, as the matrix units want 8-bit operands. Gradients of weights are products of what was not
rounded.

With ``home`` the last kernel of y, and that of dX, stores each token's row in the memory of the
rank it came from. So rows travel while other products are still computed.

Letters: T tokens, D hidden, F ffn width (2F in w1 for GLU), E experts, K top-k, N = T·K rows.
"""

import torch
from torch import Tensor

from mb_kernels.expert_mlp.bias import dots, expert_sums
from mb_kernels.expert_mlp.dact import dact
from mb_kernels.expert_mlp.plan import ExpertPlan, expert_plan
from mb_kernels.expert_mlp.up import up
from mb_kernels.float8.kernels import to_float8
from mb_kernels.grouped_gemm.kernels import outer, rows_times_weights, schedule
from mb_kernels.permute.kernels import combine, spread, sum_partials
from mb_kernels.runtime.descriptors import operand
from mb_kernels.runtime.plan import plan_of
from mb_kernels.runtime.scales import Scales


def expert_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    transposed: list[bool],
    activation: str,
    saved_bits: int,
    keep_rows: bool,
    fp8: bool,
    home: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [T, D]; h [N, F], row tiles [.., 4] and rows of x [N, D] for the backward.

    h is empty with ``saved_bits`` 0, rows are without ``keep_rows``; with ``home`` y means nothing.
    """
    x, w1, w2, weights = operand(x), operand(w1), operand(w2), operand(weights)
    b1, b2 = (b if b is None else operand(b) for b in (b1, b2))
    rows, top_k, save_h = order.shape[0], weights.shape[1], saved_bits > 0
    plan = expert_plan(plan_of(x), activation, rows, w1.shape[0], keep_rows=keep_rows, fp8=fp8)
    row_tiles = schedule(offsets, rows, plan.up.block_m)
    if rows == 0 or w1.numel() == 0:
        columns = w1.shape[2 if transposed[0] else 1]
        h = x.new_empty((rows, columns) if save_h else (0,))
        kept = x.new_empty((rows, x.shape[1]) if keep_rows else (0,))
        return torch.zeros_like(x), h, row_tiles, kept
    tiles = _Tiles(offsets, rows, plan.up.block_m, row_tiles)
    indices = (order, inverse, offsets)
    h, a, source = _up(
        *(x, w1, b1, plan, row_tiles, indices, top_k),
        transposed=transposed[0],
        in_rows=False,
        keep_rows=keep_rows,
        save_h=save_h,
    )
    kept = source if keep_rows else _nothing(x)
    del source
    y = _to_tokens(
        *(a, w2, b2, plan, tiles, indices, top_k, weights), transpose=not transposed[1], home=home
    )
    return y, h, row_tiles, kept


def expert_mlp_backward(
    do: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    weights: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    transposed: list[bool],
    h: Tensor,
    row_tiles: Tensor,
    activation: str,
    in_rows: bool,
    fp8: bool,
    needs: list[bool],
    home: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2, weights, b1 and b2, in their shapes; empty where not needed.

    x is [N, D] if ``in_rows``. An empty h is computed again. With ``home`` x's gradient means
    nothing.
    """
    need_x, need_w1, need_w2, need_weights, need_b1, need_b2 = needs
    rows, top_k, experts = order.shape[0], weights.shape[1], w1.shape[0]
    do, x, w1, w2, weights, h = (operand(t) for t in (do, x, w1, w2, weights, h))
    b1, b2 = (b if b is None else operand(b) for b in (b1, b2))
    if rows == 0 or w1.numel() == 0:
        return tuple(  # x's gradient has a row for each token, as do has
            torch.zeros_like(t) if need and t is not None else _nothing(x)
            for t, need in zip((do, w1, w2, weights, b1, b2), needs, strict=True)
        )
    plan = expert_plan(plan_of(x), activation, rows, experts, keep_rows=in_rows, fp8=fp8)
    tiles = _Tiles(offsets, rows, plan.up.block_m, row_tiles)
    indices = (order, inverse, offsets)
    if h.numel() == 0:
        h = _up(  # [0]: of the three it alone stays in memory
            *(x, w1, b1, plan, row_tiles, indices, top_k),
            transposed=transposed[0],
            in_rows=in_rows,
            keep_rows=False,
            save_h=True,
        )[0]

    tile = plan.dact
    listed = tiles(tile.block_m)
    places = (inverse, top_k, rows)
    do_rows, w, last, scales = _operands(plan, do, w2, last=transposed[1], places=places)
    biased = b2 is not None and (need_weights or need_b2)
    more = dots(do.shape[1]) if biased else 0
    dh, a, partials = dact(
        *(do_rows, w, order, weights, listed, h, plan.activation),
        transposed=last,
        tile=tile,
        scales=scales,
        more_partials=more,
    )
    del w, scales
    if plan.float8 and (need_w2 or biased):
        do_rows = spread(do, *places)
    d_b1, d_b2, d_w1, d_w2, dx = (_nothing(x) for _ in range(5))
    if b1 is not None and need_b1:
        d_b1 = expert_sums(dh, listed, tile.block_m, offsets, b1)
    if biased:
        weighted = (order, weights, partials[-more:])
        d_b2 = expert_sums(do_rows, listed, tile.block_m, offsets, b2, weighted=weighted)
    d_weights = sum_partials(partials, order, offsets, weights) if need_weights else _nothing(x)
    del partials, h
    if need_w2:
        d_w2 = _weight_gradient(do_rows, a, offsets, transposed[1])
    del a, do_rows
    if need_x:
        dx = _to_tokens(
            *(dh, w1, None, plan, tiles, indices, top_k, None), transpose=transposed[0], home=home
        )
    if need_w1:
        x_rows = x if in_rows else spread(x, *places)
        d_w1 = _weight_gradient(dh, x_rows, offsets, transposed[0])
    return dx, d_w1, d_w2, d_weights, d_b1, d_b2 if need_b2 else _nothing(x)


def _nothing(x: Tensor) -> Tensor:
    """Stands for what is not kept, or for a gradient that is not needed."""
    return x.new_empty(0)


def _up(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    plan: ExpertPlan,
    row_tiles: Tensor,
    indices: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    *,
    transposed: bool,
    in_rows: bool,
    keep_rows: bool,
    save_h: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre-activations, activations, and with ``keep_rows`` x copied to rows.

    ``in_rows``: x is in rows already.
    """
    order, inverse, _ = indices
    places = (inverse, top_k, order.shape[0])
    if keep_rows:
        x, in_rows = spread(x, *places), True
    copied = plan.in_rows and not in_rows
    rows, w, last, scales = _operands(
        plan, x, w1, last=not transposed, places=places if copied else None
    )
    h, a = up(
        *(rows, w, b1, row_tiles, plan.activation),
        transposed=not last,
        order=None if plan.in_rows else order,
        top_k=top_k,
        save_h=save_h,
        tile=plan.up,
        scales=scales,
    )
    return h, a, x


def _operands(
    plan: ExpertPlan,
    x: Tensor,
    w: Tensor,
    *,
    last: bool,
    places: tuple[Tensor, int, int] | None = None,
) -> tuple[Tensor, Tensor, bool, Scales | None]:
    """Both operands of a product, whether the last dimension of w is contracted, and scales.

    They are x and w, or codes of them. ``places``: x is of tokens, to be copied to rows, of which
    this is the ``inverse``, ``top_k`` and the number. ``last``: of w as it is given.
    """
    if not plan.float8:
        return x if places is None else spread(x, *places), w, last, None
    codes, scales = to_float8(x)
    if places is not None:
        codes = spread(codes.view(torch.bfloat16), *places).view(codes.dtype)  # two at a time
        scales = spread(scales[:, None], *places).flatten()
    weights, columns = to_float8(w, transpose=not last)
    return codes, weights, True, Scales(scales, columns, x.dtype)


def _weight_gradient(outputs: Tensor, inputs: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """[E, outputs, inputs], the gradient of a weight, or with these two exchanged."""
    pair = (inputs, outputs) if transposed else (outputs, inputs)
    return outer(*pair, offsets)


def _to_tokens(
    rows: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: ExpertPlan,
    tiles: "_Tiles",
    indices: tuple[Tensor, Tensor, Tensor],
    top_k: int,
    weights: Tensor | None,
    *,
    transpose: bool,
    home: Tensor | None,
) -> Tensor:
    """Rows times weights, plus bias, summed per token: down with routing weights, else dX.

    ``transpose``: w is [E, columns of the result, columns of rows]. With ``home`` the sums are
    stored there, and what is returned means nothing.
    """
    order = indices[0]
    tile = plan.dx if weights is None else plan.down
    single = top_k == 1
    rows, w, last, scales = _operands(plan, rows, w, last=transpose)
    y = rows_times_weights(
        rows,
        w,
        tiles(tile.block_m),
        transpose_weight=last,
        tile=tile,
        scales=scales,
        bias=bias,
        scatter_order=order if single else None,
        scatter_inverse=indices[1] if single else None,
        scale=weights if single else None,
        fill_dropped=single,
        home=home if single else None,
    )
    return y if single else combine(y, *indices, weights, top_k, home)


class _Tiles:
    """Row tiles of one set of offsets, built once per height; ``first`` has height ``block_m``."""

    def __init__(self, offsets: Tensor, rows: int, block_m: int, first: Tensor) -> None:
        self.offsets, self.rows = offsets, rows
        self.built = {block_m: first}

    def __call__(self, block_m: int) -> Tensor:
        if block_m not in self.built:
            self.built[block_m] = schedule(self.offsets, self.rows, block_m)
        return self.built[block_m]
