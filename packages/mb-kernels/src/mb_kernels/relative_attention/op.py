"""Attention within segments of tokens, with a bias for each head and distance added to the scores.

T5's bias depends on these two alone (arXiv 1910.10683, section 2.1). As the mask of a general
attention it would be B H S^2 numbers that every layer reads, with a gradient as large. Here bias
and gradient are H (2 S - 1) numbers. All sums have a fixed order, so gradients are the same bit for
bit each time.

Letters: T tokens, H query heads, G key-value heads, C width of a head, N segments, S the longest
segment that there may be, A the distances 1 - S to S - 1.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.relative_attention import reference
from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide_dtype

_WIDEST = 128


def relative_attention(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    bias_HA: Tensor,
    offsets_N1: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale + bias) v within each segment; differentiable in q, k, v and the bias.

    Args:
        q_THC: [T, H, C], queries of all segments, one behind the other.
        k_TGC, v_TGC: [T, G, C], G a divisor of H: each serves H / G heads, neighbours.
        bias_HA: [H, 2 S - 1], any floating dtype: added to the scores, by the place of the key
            minus that of the query, 1 - S to S - 1. -inf hides the keys at a distance; a token all
            of whose keys are hidden gets 0.
        offsets_N1: [N + 1], int32 or int64, where segments begin: from 0 to T. A segment may be
            empty and has at most S tokens (checked on CPUs, and under MB_DEBUG=1).
        causal: no token sees a later one.
        scale: of the products; None: 1 / sqrt(C).

    Returns:
        y_THC in the dtype of q. Products are computed in it, sums, softmax and bias in fp32.
        Hidden keys weigh 0, and 0 times NaN is NaN: as in torch's attention one NaN or infinity in
        a key or value may reach every token of its segment, and the gradients too.
        On a GPU the gradients of q, k and bias are built upon y as it is stored, as those of other
        fused attention: in bf16, where all values of a segment have a mean ten times their
        deviation in common, they are right to 2 % alone, and that of q likewise with keys. Take
        such a mean off before; of the values add it to y again. Elsewhere it costs nothing.

    Raises:
        ValueError: shapes, dtypes or devices that do not match; heads wider than 128 on a GPU.
    """
    checks.require_same("q_THC", q_THC, k_TGC=k_TGC, v_TGC=v_TGC)
    checks.require_floating("bias_HA", bias_HA)
    checks.require_device("q_THC", q_THC, bias_HA=bias_HA)
    checks.require_indices("q_THC", q_THC, offsets_N1=offsets_N1)
    if q_THC.ndim != 3 or k_TGC.ndim != 3 or k_TGC.shape != v_TGC.shape:
        raise ValueError(
            "k_TGC, v_TGC: expected [tokens, heads, width] alike, and queries of three dimensions "
            f"too; got {tuple(k_TGC.shape)}, {tuple(v_TGC.shape)} and {tuple(q_THC.shape)}."
        )
    (T, H, C), G = q_THC.shape, k_TGC.shape[1]
    if H == 0:
        raise ValueError(f"q_THC: expected one head at least; got {tuple(q_THC.shape)}.")
    if k_TGC.shape != (T, G, C) or G == 0 or H % G:
        raise ValueError(
            f"k_TGC: expected [{T}, a divisor of {H}, {C}] for queries {tuple(q_THC.shape)}; got "
            f"{tuple(k_TGC.shape)}."
        )
    if bias_HA.ndim != 2 or bias_HA.shape[0] != H or bias_HA.shape[1] % 2 == 0:
        raise ValueError(
            f"bias_HA: expected [{H}, 2 S - 1], a number for each head and distance; got "
            f"{tuple(bias_HA.shape)}."
        )
    if offsets_N1.ndim != 1 or offsets_N1.shape[0] < 2:
        raise ValueError(
            "offsets_N1: expected the beginnings of segments and their end, two numbers at least; "
            f"got shape {tuple(offsets_N1.shape)}."
        )
    if registration.use_triton(q_THC) and C > _WIDEST:
        raise ValueError(
            f"q_THC: expected heads of at most {_WIDEST} numbers; got {C}. Use the twin in "
            "mb_kernels.reference, which takes any width."
        )
    checks.require_constant(scale=scale)
    scale = max(C, 1) ** -0.5 if scale is None else float(scale)
    y_THC, _ = torch.ops.mb.relative_attention(
        q_THC, k_TGC, v_TGC, bias_HA, offsets_N1, causal, scale
    )
    return y_THC


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((2, q.shape[1], q.shape[0]), dtype=wide_dtype(q))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    saved = ctx.saved_tensors  # read once: under checkpoint a second reading fails
    need_bias = ctx.needs_input_grad[3]
    dq, dk, dv, d_bias = torch.ops.mb.relative_attention_backward(
        dy, *saved, ctx.causal, ctx.scale, need_bias
    )
    return dq, dk, dv, d_bias.to(saved[3].dtype) if need_bias else None, None, None, None


def _backward_fake(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    d_bias = bias.new_empty(bias.shape if rest[-1] else (0,), dtype=wide_dtype(q))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias


def _flops(q: tuple[int, ...], k: Any, v: Any, bias: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Of two products, were every segment the longest; how long they are only the device knows."""
    T, H, C = q
    return 4 * T * H * C * (bias[1] + 1) // 2


registration.register(
    "relative_attention(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor offsets, bool causal, "
    "float scale) -> (Tensor, Tensor)",
    reference=reference.forward,
    kernels="mb_kernels.relative_attention.kernels",
    fake=_fake,
    flops=_flops,
    setup_context=_setup,
    backward=_backward,
    debug_check=lambda q, k, v, bias, offsets, *_: reference.check_segments(
        offsets, bias, q.shape[0]
    ),
)
registration.register(
    "relative_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor bias, "
    "Tensor offsets, Tensor y, Tensor norms, bool causal, float scale, bool need_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.backward,
    kernels="mb_kernels.relative_attention.kernels",
    fake=_backward_fake,
    flops=lambda dy, q, k, v, bias, *_, **__: 5 * _flops(q, k, v, bias) // 2,
)
