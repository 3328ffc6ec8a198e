"""Sinks: a score more in the sum of each head's softmax, of what has no value.

A head that finds nothing gives its weight to the sink instead of some token (arXiv 2309.17453;
learned for each head in GPT-OSS, arXiv 2508.10925). There are two ways to compute it.

Where scores are masked the sink is a key behind those of the tokens, with a value of zeros. It has
channels of its own, one for each query head of its group, in which it holds their sinks, tokens
hold 0, and a query has 1 in its head's. So one mask serves all heads and layers, and gradients are
those of any key.

Flash attention knows no sink, but returns lse, the logarithm of each row's sum, and with it a sink
s is put in afterwards:

    lse' = log(exp(lse) + exp(s))        y' = y exp(lse - lse')

Its backward pass takes back what the forward pass returned, and from nothing else makes the weights
p = exp(scores - lse) and the sums D = dy · y of the softmax's gradient p (dy · v - D). Given lse'
and y' instead it makes p' and D', with which dq, dk and dv are those with a sink. The sink, whose
value is 0, has the gradient -exp(s - lse') D', summed over rows.

Letters: B sequences, Q and S tokens, T tokens of all sequences, H query heads, G key-value heads, R
query heads of a group (H / G), C width of a head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FORWARD = {"scale", "window_size_left", "window_size_right"}
_BACKWARD = {"logsumexp", "rng_state", "unused", *_FORWARD}


def with_sink_key(
    q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, scale: float | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries and keys with the channels of sinks, the sinks' key and value behind the others.

    Args:
        scale: of the scores; None meaning 1 / sqrt(C).
        sinks_H: any floating dtype.

    Returns:
        q [B, Q, H, C + R]; k [B, S + 1, G, C + R]; v [B, S + 1, G, C]; the scale.
    """
    (B, Q, H, C), G = q_BQHC.shape, k_BSGC.shape[2]
    R = H // G
    scale = C**-0.5 if scale is None else scale
    own_HR = torch.eye(R, dtype=q_BQHC.dtype, device=q_BQHC.device).repeat(G, 1)
    q = torch.cat([q_BQHC, own_HR.expand(B, Q, H, R)], dim=3)
    sinks_GR = (sinks_H / scale).to(k_BSGC.dtype).view(G, R)
    key_GC = F.pad(sinks_GR, (C, 0))
    k = torch.cat([F.pad(k_BSGC, (0, R)), key_GC.expand(B, 1, G, C + R)], dim=1)
    return q, k, F.pad(v_BSGC, (0, 0, 0, 0, 0, 1)), scale


@functools.cache
def flash_takes_sinks() -> bool:
    """Whether torch's flash attention has the arguments that it is given here.

    They are asked for by name: it is no public function, and releases have added to them.
    """
    aten = torch.ops.aten
    wanted = {aten._flash_attention_forward: _FORWARD, aten._flash_attention_backward: _BACKWARD}
    return all(
        names <= {argument.name for argument in op.default._schema.arguments}
        for op, names in wanted.items()
    )


def flash_with_sinks(
    q_THC: Tensor,
    k_SGC: Tensor,
    v_SGC: Tensor,
    sinks_H: Tensor,
    edges: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Attention within segments, as `segments.flash_kernel`'s, with a sink to each head.

    Args:
        q_THC: fp16 or bf16, contiguous, on a GPU.
        k_SGC, v_SGC: of as many heads, or of one for each group of them.
        sinks_H: fp32.
        edges, longest: of queries and of keys, see `segments.Bounds`.
        scale: of the scores; None meaning 1 / sqrt(C).
        window_size: how many tokens before a query's own and behind it are seen; -1: all.

    Returns:
        y_THC.
    """
    scale = q_THC.shape[2] ** -0.5 if scale is None else scale
    y_THC, _ = _attend(q_THC, k_SGC, v_SGC, sinks_H, *edges, *longest, scale, *window_size)
    return y_THC


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """torch's: y_THC, and lse_HT in fp32.

    Args:
        where: edges and longest segments of both sides, the scale, the window's two sides.
    """
    *bounds, scale, before, behind = where
    y_THC, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, 0.0, (before, behind) == (-1, 0), False,
        scale=scale, window_size_left=before, window_size_right=behind,
    )  # fmt: skip
    return y_THC, lse_HT


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, *where: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's: gradients of q, k and v, from what `flash_forward` returned, or as if it had."""
    *bounds, scale, before, behind = where
    # Of the dropout, which there is none of.
    random, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    return torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, lse, *bounds, 0.0, (before, behind) == (-1, 0), random, unused,
        scale=scale, window_size_left=before, window_size_right=behind,
    )  # fmt: skip


@torch.library.custom_op("mb_train::flash_with_sinks", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, edges_q: Tensor, edges_k: Tensor,
    longest_q: int, longest_k: int, scale: float, before: int, behind: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    where = edges_q, edges_k, longest_q, longest_k, scale, before, behind
    y_THC, lse_HT = flash_forward(q, k, v, *where)
    with_sink_HT = torch.logaddexp(lse_HT, sinks[:, None])
    y_THC.mul_((lse_HT - with_sink_HT).exp().t()[..., None])
    return y_THC, with_sink_HT


@torch.library.custom_op("mb_train::flash_with_sinks_backward", mutates_args=())
def _gradients(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, y: Tensor, lse: Tensor,
    edges_q: Tensor, edges_k: Tensor, longest_q: int, longest_k: int,
    scale: float, before: int, behind: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    where = edges_q, edges_k, longest_q, longest_k, scale, before, behind
    dy = dy.contiguous()
    dq, dk, dv = flash_backward(dy, q, k, v, y, lse, *where)
    sums_HT = (dy.float() * y.float()).sum(2).t()
    d_sinks = -((sinks[:, None] - lse).exp() * sums_HT).sum(1)
    return dq, dk, dv, d_sinks


@_attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse


@_gradients.register_fake
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (q, k, v, sinks)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, edges_q, edges_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, edges_q, edges_k)
    ctx.set_materialize_grads(False)


def _back(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (2 + len(ctx.numbers))
    if dy is None:
        return (None,) * 4 + nothing
    return *_gradients(dy, *ctx.saved_tensors, *ctx.numbers), *nothing


_attend.register_autograd(_back, setup_context=_keep)
