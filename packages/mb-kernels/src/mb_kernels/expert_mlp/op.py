"""The whole expert computation, gather to combine, as one differentiable op.

The idea and the formulas of the backward are in ``mb_kernels.expert_mlp.reference``. What autograd
keeps is x (with K = 1 its copy in the order of rows, which the backward would make again), the
pre-activations h, the index maps and the kernels' list of row tiles. With
``recompute=True`` h is dropped too and computed again; with ``saved_activation_bits`` it is kept in
8 or 4 bits. The experts' outputs are never kept: a routing weight's gradient comes from
``<W2^T do, act(h)>`` inside the backward's first product.

Letters: T tokens, D hidden, F ffn width (2F in w1 for GLU), E experts, K top-k, N = T·K rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mb_kernels.bins import Bins, row_tiles
from mb_kernels.expert_mlp import arguments
from mb_kernels.expert_mlp.reference import expert_mlp_backward, expert_mlp_forward
from mb_kernels.permute.op import bins_of
from mb_kernels.permute.reference import combine, gather
from mb_kernels.quantize.op import dequantize, quantize
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.widths import cut
from mb_kernels.uncompiled import uncompiled

_WHOLE = 16  # bits that stand for "in the dtype they have"


def expert_mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    bins: Bins,
    weights_TK: Tensor,
    *,
    activation: str = "swiglu",
    b1_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    max_rows: int | None = None,
    recompute: bool = False,
    saved_activation_bits: int | None = None,
    fp8: bool = False,
    x_stays: bool = True,
    home_P: Tensor | None = None,
) -> Tensor:
    """Send every token through its experts and sum their weighted outputs.

    Args:
        x_TD: [T, D]; fp32, bf16 or fp16. On a GPU a D or F that is no multiple of 16 costs wider
            copies, of the weights too, and the backward pass keeps them.
        w1_EFD: [E, F, D], or [E, 2F, D] for a GLU activation, gate over up; dtype of x_TD.
        w2_EDF: [E, D, F]; dtype of x_TD. w1 and w2 may also lie transposed in memory, without a
            copy: a weight stored as [E, D, F] is passed as ``w.mT``, and its gradient lies the same
            way. Other strides are copied.
        bins: from ``bin_tokens`` on expert ids [T, K] with E experts.
        weights_TK: [T, K] routing weights, normally fp32.
        activation: a name from ``mb_kernels.activation``, with numbers or without.
        b1_EF: [E, F], or [E, 2F] as w1: added to the pre-activations. Any dtype, as b2_ED.
        b2_ED: [E, D], added to each expert's output before it is weighted.
        max_rows: the most rows that all experts together compute, at least ``bins.offsets_E1[-1]``;
            tensors of rows get this size instead of T·K, and so does what is kept. The caller knows
            it from a capacity or another bound. If there are more, which the host cannot know, the
            result is NaN, of every token that an expert takes; with ``MB_DEBUG=1`` it is an error.
        recompute: keep only x and the index maps for the backward, and compute the
            pre-activations again there.
        saved_activation_bits: keep the pre-activations in 8 or 4 bits, by ``quantize``. The output
            is exact, the gradients are those at the rounded pre-activations. None keeps them as
            they are.
        fp8: compute the products of rows and weights, four of the six, in 8-bit floats: both
            operands are rounded by ``to_float8``, with a scale for each row and for each output
            channel. Gradients of weights, two of the six, are products of what was not rounded.
            On a GPU for bf16 alone, on NVIDIA's from Ada and Hopper on, AMD's MI300, MI350 and
            RX 9070.
        x_stays: False if something else is written to the memory of x_TD before the backward pass,
            as to a buffer for what other ranks send. Then x_TD is copied, unless the op keeps a
            copy anyway (on a GPU, with one expert a token and without ``recompute``).
        home_P: [P] int64, addresses that are multiples of 16; for ``mb_kernels.exchange``, and only
            where kernels run. The tokens came from P ranks, T / P from each. The result for token i
            of rank p is not returned but stored i rows after home_P[p]; so is, in the backward
            pass, the gradient of x_TD. Nothing is stored for a token that no expert takes, nor,
            with K = 1, for one whose row is beyond ``max_rows``.

    Returns:
        y_TD [T, D] in the dtype of x_TD. Differentiable in x_TD, weights, biases and weights_TK.
        With ``home_P`` it, and the gradient of x_TD, are NaN.

    Raises:
        ValueError: unknown activation; shapes, dtypes or devices that do not match; on a GPU 2**31
            elements, or 2**24 rows or columns, of an expert's w1, or 2**30 slots; ``home_P`` where
            no kernels run, or for rows whose width is not a multiple of 16.
    """
    arguments.check_experts(x_TD, w1_EFD, w2_EDF, bins, weights_TK, activation)
    arguments.check_biases(x_TD, w1_EFD, w2_EDF, b1_EF, b2_ED)
    if fp8:
        checks.require_float8("x_TD", x_TD)
        arguments.check_float8(activation)
    is_float = isinstance(saved_activation_bits, float)  # 8.0 equals 8, but ops take integers
    is_known = saved_activation_bits in (None, 4, 8) and not is_float
    if not is_known or (recompute and saved_activation_bits):
        raise ValueError(
            "saved_activation_bits: expected 4, 8 or None, and None with recompute=True, which "
            f"keeps no activations; got {saved_activation_bits!r} with recompute={recompute}."
        )
    checks.require_integer(max_rows=max_rows)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows: expected None or at least 1; got {max_rows}.")
    if max_rows is not None and max_rows < bins.order_N.shape[0]:
        bins, weights_TK = arguments.bounded(bins, weights_TK, max_rows)
    hidden = x_TD.shape[1]
    if home_P is not None:
        _check_home(x_TD, w1_EFD, home_P)
    x_TD, w1_EFD, w2_EDF, b1_EF, b2_ED = arguments.fitted(
        *(x_TD, w1_EFD, w2_EDF, b1_EF, b2_ED, activation), even=saved_activation_bits == 4
    )
    checks.require_addressable("w1_EFD", w1_EFD, w1_EFD.shape)
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x_TD, w1_EFD, w2_EDF, weights_TK, b1_EF, b2_ED)
    )
    indices = checks.int32(bins.order_N, bins.inverse_N, bins.offsets_E1)
    saved_bits = (saved_activation_bits or _WHOLE) if differentiable and not recompute else 0
    keep_rows = saved_bits > 0 and weights_TK.shape[1] == 1 and registration.use_triton(x_TD)
    if differentiable and not (x_stays or keep_rows):
        x_TD = x_TD.clone()
    transposed = [not w.is_contiguous() and w.mT.is_contiguous() for w in (w1_EFD, w2_EDF)]
    w1, w2 = (w.mT if t else w for w, t in zip((w1_EFD, w2_EDF), transposed, strict=True))
    tensors = (x_TD, w1, w2, *indices, weights_TK, b1_EF, b2_ED)
    options = (transposed, activation, saved_bits, keep_rows, fp8)
    if home_P is None:
        return cut(torch.ops.mb.expert_mlp(*tensors, *options)[0], hidden)
    return _at_home(*tensors, *options, home_P)


@uncompiled
def _at_home(*inputs: Any) -> Tensor:
    from mb_kernels.expert_mlp.home import ExpertMLPHome  # imports Triton

    return ExpertMLPHome.apply(*inputs)[0]


def _check_home(x_TD: Tensor, w1_EFD: Tensor, home_P: Tensor) -> None:
    ranks = home_P.numel()
    if home_P.dtype is not torch.int64 or home_P.ndim != 1 or not ranks or x_TD.shape[0] % ranks:
        raise ValueError(
            f"home_P: expected int64 [P], an address for each of P equal parts of {x_TD.shape[0]} "
            f"tokens; got {home_P.dtype} {tuple(home_P.shape)}."
        )
    checks.require_device("x_TD", x_TD, home_P=home_P)
    if not registration.use_triton(x_TD) or not w1_EFD.numel() or x_TD.shape[1] % 16:
        raise ValueError(
            "home_P: expected kernels, rows of a multiple of 16 numbers, and experts of at least "
            f"one feature; got {x_TD.dtype} on {x_TD.device}, w1_EFD {tuple(w1_EFD.shape)}. Send "
            "the result by PeerMemory.push."
        )


class Given(NamedTuple):
    """The arguments that forward and backward share, in the order of their schemas."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor
    weights: Tensor
    b1: Tensor | None
    b2: Tensor | None
    transposed: list[bool]

    def upright(self, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Swap the last two dimensions of the weights that are stored transposed."""
        first, second = self.transposed
        return w1.mT if first else w1, w2.mT if second else w2


# The op's inputs begin with these fields: first so many tensors, some of them with a gradient.
_TENSORS = Given._fields.index("transposed")
_LEARNED = [Given._fields.index(n) for n in ("x", "w1", "w2", "weights", "b1", "b2")]


def _given(args: Sequence[Any]) -> tuple[Given, Sequence[Any]]:
    """The op's arguments: those that forward and backward share, and the others."""
    count = len(Given._fields)
    return Given(*args[:count]), args[count:]


def _forward_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, (activation, saved_bits, keep_rows, fp8) = _given(args)
    x, bins = given.x, bins_of(given.order, given.inverse, given.offsets)
    fixed, biases = (*given.upright(given.w1, given.w2), bins, given.weights), (given.b1, given.b2)
    y, h = expert_mlp_forward(x, *fixed, activation, *biases, fp8=fp8)
    rows = gather(x, bins, 1) if keep_rows else x.new_empty(0)
    return y, h if saved_bits else x.new_empty(0), given.order.new_empty((0, 4)), rows


def _backward_reference(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    given, (h, _, activation, in_rows, fp8, needs) = _given(args)
    x, bins = given.x, bins_of(given.order, given.inverse, given.offsets)
    fixed, biases = (*given.upright(given.w1, given.w2), bins, given.weights), (given.b1, given.b2)
    if in_rows:
        x = combine(x, bins, None, 1)
    if h.numel() == 0:
        h = expert_mlp_forward(x, *fixed, activation, *biases, fp8=fp8)[1]
    dx, d_w1, d_w2, *others = expert_mlp_backward(*(do, x, *fixed, h, activation, *biases), fp8=fp8)
    assert d_w1 is not None
    assert d_w2 is not None
    return _needed(given, (dx, *given.upright(d_w1, d_w2), *others), needs)


def _needed(
    given: Given, grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    """The gradients that are needed, an empty tensor for each other one."""
    return tuple(
        g if need and g is not None else given.x.new_empty(0)
        for g, need in zip(grads, needs, strict=True)
    )


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given, (_, saved_bits, keep_rows, _) = _given(args)
    x, rows, experts = given.x, given.order.shape[0], given.w1.shape[0]
    columns = given.w1.shape[2 if given.transposed[0] else 1]
    h = x.new_empty((rows, columns) if saved_bits else (0,))
    count = row_tiles(rows, experts) if registration.use_triton(x) else 0
    kept = x.new_empty((rows, x.shape[1]) if keep_rows else (0,))
    return x.new_empty(x.shape), h, given.order.new_empty((count, 4)), kept


def _backward_fake(do: Tensor, *args: Any) -> tuple[Tensor, ...]:
    given, (*_, needs) = _given(args)
    others = (given.w1, given.w2, given.weights, given.b1, given.b2)
    # x may be in rows, and ``max_rows`` leave fewer of them than there are tokens.
    dx = given.x.new_empty((given.weights.shape[0], given.x.shape[1]))
    like = [t if t is None else t.new_empty(t.shape) for t in others]
    return _needed(given, [dx, *like], needs)


def set_up(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    """Save the op's inputs and outputs for ``gradients``."""
    x, *tensors, ctx.transposed, ctx.activation, ctx.saved_bits, ctx.in_rows, ctx.fp8 = inputs
    _, h, tiles, rows = output
    kept = quantize(h, ctx.saved_bits) if ctx.saved_bits in (4, 8) else (h,)
    ctx.save_for_backward(rows if ctx.in_rows else x, *tensors, tiles, *kept)
    ctx.mark_non_differentiable(h, tiles, rows)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return gradients(ctx, do, torch.ops.mb.expert_mlp_backward)


def gradients(
    ctx: Any, do: Tensor | None, compute: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor | None, ...]:
    """Gradients of the op's inputs, by ``compute``, as ``mb::expert_mlp_backward``."""
    needed = ctx.needs_input_grad
    of_inputs: list[Tensor | None] = [None] * len(needed)
    if do is None:
        return tuple(of_inputs)
    needs = [needed[i] for i in _LEARNED]
    saved = ctx.saved_tensors  # read once: under checkpoint a second reading fails
    tensors, (tiles, *kept) = saved[:_TENSORS], saved[_TENSORS:]
    h = kept[0]
    if ctx.saved_bits in (4, 8):
        h = dequantize(*kept, bits=ctx.saved_bits, dtype=do.dtype)
    options = (ctx.activation, ctx.in_rows, ctx.fp8, needs)
    grads = compute(do, *tensors, ctx.transposed, h, tiles, *options)
    for i, grad, need in zip(_LEARNED, grads, needs, strict=True):
        of_inputs[i] = grad if need else None
    return tuple(of_inputs)


def _products(shapes: Any) -> tuple[int, int]:
    """FLOPs of the up- and of the down-projection, of ``Given`` shapes."""
    rows, w1, w2 = shapes.order[0], shapes.w1, shapes.w2
    return 2 * rows * w1[1] * w1[2], 2 * rows * w2[1] * w2[2]


def _forward_flops(*shapes: Any, **kwargs: Any) -> int:
    return sum(_products(_given(shapes)[0]))


def _backward_flops(do_shape: Any, *shapes: Any, **kwargs: Any) -> int:
    given, (h_shape, *_, needs) = _given(shapes)
    up, down = _products(given)
    recomputed = up if h_shape[0] == 0 and given.order[0] > 0 else 0
    dx, dw1, dw2 = needs[:3]
    return recomputed + down + dx * up + dw1 * up + dw2 * down


_INPUTS = (
    "Tensor x, Tensor w1, Tensor w2, Tensor order, Tensor inverse, Tensor offsets, "
    "Tensor weights, Tensor? b1, Tensor? b2, bool[] transposed"
)
registration.register(
    f"expert_mlp({_INPUTS}, str activation, int saved_bits, bool keep_rows, bool fp8) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=_forward_reference,
    kernels="mb_kernels.expert_mlp.steps",
    fake=_forward_fake,
    flops=_forward_flops,
    setup_context=set_up,
    backward=_backward,
    debug_check=lambda x, w1, w2, order, inverse, offsets, *_: checks.debug_offsets(
        offsets, order.shape[0]
    ),
)
registration.register(
    f"expert_mlp_backward(Tensor do, {_INPUTS}, Tensor h, Tensor tiles, str activation, "
    "bool in_rows, bool fp8, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_reference,
    kernels="mb_kernels.expert_mlp.steps",
    fake=_backward_fake,
    flops=_backward_flops,
)
