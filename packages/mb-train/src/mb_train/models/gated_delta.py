"""The gated delta rule: heads that keep a state, in place of all tokens before (Gated DeltaNet).

That of arXiv 2412.06464. A head's state s is a matrix [C, V], from keys to values, and zero before
the first token of a document. Each token lets it fade, asks what it holds for the token's key,
writes the difference to the token's own value, and reads with its query:

    s = exp(decay) s        s = s + beta k (v - k s)        y = q s / sqrt(C)

Token by token that would be a loop over a sequence. In chunks of L tokens it is products: with t
the sum of a chunk's decays up to a token, what token i writes, e_i, solves a triangular system,

    e_i + sum over j < i of beta_i exp(t_i - t_j) (k_i k_j) e_j = beta_i (v_i - exp(t_i) k_i s)

with s the state in front of the chunk, and the loop is over chunks. Two sides compute it so: plain
PyTorch in fp32, on any device, and on a GPU the kernels of flash-linear-attention, where that is
installed.

Letters: B sequences, S tokens of a sequence, G key heads, H value heads (a multiple), C width of a
key, V of a value, N chunks, L tokens of a chunk.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from mb_kernels.chunks import chunk_length, cut, joined, remains
from mb_kernels.runtime.precision import wide, wide_dtype
from mb_kernels.uncompiled import uncompiled
from torch import Tensor

from mb_train.models.states import StateContext

# A decay with which nothing remains of a state: its exponential is 0 in fp32. Other decays of its
# chunk are added to it, so it is no larger than that takes.
_FORGETTING = -104.0
_MAX_KEY = 256  # of the kernels
# Releases of Triton, from the one up to the other, that compile a kernel of its backward pass
# wrongly on Hopper, where the library refuses to launch it then.
_MISCOMPILING = ((3, 4, 0), (3, 7, 1))
_LEAST = (0, 6)  # release of flash-linear-attention that has less key heads than value heads
_EPSILON = 1e-6  # of keys' and queries' length, as in the kernels and in transformers


@functools.cache
def installed_kernel() -> tuple[Callable[..., Any], str] | None:
    """flash-linear-attention's kernel and its version; None without it, or with one too old.

    Looked for when it is wanted: it imports Triton and all of its own kernels.
    """
    try:
        import fla  # ty: ignore[import-not-found]  # an extra
        from fla.ops.gated_delta_rule import (  # ty: ignore[import-not-found]
            chunk_gated_delta_rule,
        )
    except ImportError:
        return None
    release = tuple(map(int, re.findall(r"\d+", fla.__version__)[:2]))  # of "0.6rc1" too
    return None if release < _LEAST else (chunk_gated_delta_rule, fla.__version__)


def delta_kernel(key_size: int, device: torch.device) -> Callable[..., Any] | None:
    """The kernel for such keys on this device, or None: then it is plain PyTorch."""
    found = installed_kernel() if device.type == "cuda" else None
    return None if found is None or _obstacle(key_size, device) else found[0]


def delta_note(key_size: int, device: torch.device) -> str:
    """What is said of a run's choice."""
    if device.type != "cuda":
        return "gated delta rule: in plain PyTorch"
    found, reason = installed_kernel(), "which is slow; the extra mb-train[delta] has kernels"
    if found is not None:
        reason = _obstacle(key_size, device)
        if not reason:
            return f"gated delta rule: the kernels of flash-linear-attention {found[1]}"
    return f"gated delta rule: in plain PyTorch, {reason}"


def _obstacle(key_size: int, device: torch.device) -> str:
    """Why the kernel, which is installed, cannot be taken on this GPU; "" if it can."""
    if key_size > _MAX_KEY:
        return f"for keys wider than {_MAX_KEY}"
    if torch.are_deterministic_algorithms_enabled():  # as in Megatron Core
        return "which is deterministic"
    if _is_hopper(device) and _MISCOMPILING[0] <= _triton_release() < _MISCOMPILING[1]:
        return "which is slow; on Hopper the kernels ask for Triton 3.7.1, torch 2.13's"
    return ""


def _is_hopper(device: torch.device) -> bool:
    nvidia = torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache  # every forward pass asks, and the answer is in a file
def _triton_release() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version("triton"))[:3]))


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(x x + epsilon) over the last dimension, computed in fp32, in x's dtype."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + _EPSILON)).to(x.dtype)


def gated_delta_rule(
    q_BSGC: Tensor,
    k_BSGC: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    context: StateContext,
    *,
    state_BHCV: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The rule over sequences, and the state behind their last tokens.

    Value heads g R to (g + 1) R - 1, R = H / G, share key head g.

    Args:
        q_BSGC, k_BSGC: at least one token; usually of length 1.
        decay_BSH, beta_BSH: the logarithm of what remains of a state, at most 0, and how much of
            the difference is written; fp32. A token with 0 and 0 leaves the state as it is.
        state_BHCV: before the first tokens, fp32; None: zero, and none is asked for.

    Returns:
        y_BSHV in v's dtype, and the state in fp32.

    Raises:
        ValueError: value heads that the key heads do not divide.
    """
    G, H = k_BSGC.shape[2], v_BSHV.shape[2]
    if H % G:
        raise ValueError(f"Expected the key heads to divide the value heads, got {G} and {H}.")
    if context.kernel is None:
        return _chunked(q_BSGC, k_BSGC, v_BSHV, decay_BSH, beta_BSH, context.begins_BS, state_BHCV)
    if context.begins_BS is not None:
        # In place of the places where documents begin, for which the kernel waits for the host.
        decay_BSH = decay_BSH.masked_fill(context.begins_BS[..., None], _FORGETTING)
    return context.kernel(
        *(x.contiguous() for x in (q_BSGC, k_BSGC, v_BSHV)),
        g=decay_BSH,
        beta=beta_BSH,
        initial_state=state_BHCV,
        output_final_state=state_BHCV is not None,
    )


@uncompiled  # or there would be a graph for each length, whose loop takes minutes to compile
def _chunked(
    q_BSGC: Tensor,
    k_BSGC: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    begins_BS: Tensor | None,
    state_BHCV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, S, H, V = v_BSHV.shape
    G, C = k_BSGC.shape[2:]
    L, numbers = chunk_length(S), wide_dtype(v_BSHV)
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q_BSGC, k_BSGC))
    # Filled up behind with tokens of 0, which change no state.
    q, k, v, beta = (cut(x.to(numbers), L) for x in (q, k, v_BSHV, beta_BSH))
    q = q * C**-0.5
    between, into, onward, through = remains(decay_BSH, begins_BS, L, numbers)
    into, onward, beta = into[..., None], onward[..., None], beta[..., None]
    system = ((beta * k) @ k.mT * between).tril(-1)
    solved = _Inverse.apply(system) @ torch.cat([beta * v, beta * into * k], dim=-1)
    own, of_state = solved.split([V, C], dim=-1)
    within, q, k = q @ k.mT * between, q * into, k * onward
    state = v.new_zeros(B, H, C, V) if state_BHCV is None else state_BHCV.to(numbers)
    outputs = []
    for q_n, k_n, own_n, of_state_n, within_n, through_n in zip(
        *(x.unbind(2) for x in (q, k, own, of_state, within, through)), strict=True
    ):
        written = own_n - of_state_n @ state
        outputs.append(q_n @ state + within_n @ written)
        state = through_n[..., None, None] * state + k_n.mT @ written
    return joined(torch.stack(outputs, dim=2), S).to(v_BSHV.dtype), state


class _Inverse(torch.autograd.Function):
    """(1 + A)^-1 of matrices A [..., L, L] that are 0 on and above the diagonal; L a power of two.

    Of the blocks on the diagonal, which are made twice as large until there is one:

        [a   ]^-1   [     a^-1            ]
        [b  c]    = [-c^-1 b a^-1    c^-1 ]

    Products alone, which every device has, and every compiler knows.
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        L = A.shape[-1]
        inverse = A.new_ones(*A.shape[:-2], L, 1, 1)
        while (size := inverse.shape[-1]) < L:
            blocks = A.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
            below = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
            first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
            corner = -second @ below @ first
            upper = torch.cat([first, torch.zeros_like(first)], dim=-1)
            inverse = torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2)
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)
