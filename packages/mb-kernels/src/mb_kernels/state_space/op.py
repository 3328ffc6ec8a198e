"""Selective state spaces: the scan of Mamba-2 (arXiv 2405.21060, section 6).

A head's state s is a matrix [N, P], zero before the first token of a document. Each token lets it
fade, by a rate of the head's and a step of the token's own, writes its number x in the direction of
its b, and reads in that of its c; what it wrote may pass the state by, too:

    s = exp(dt A) s + dt b x        y = c s + D x

Heads of a group share b and c. Token by token that would be a loop over a sequence. In chunks it is
products (state-space duality), for a token reads of another in its chunk

    (c_i b_j) exp(t_i - t_j) dt_j x_j

with t the sum of dt A up to a token, and of those before through the state in front of its chunk.
What is kept for the backward pass are the arguments alone: the states are computed again.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, R heads of a group (H / G),
N width of a state's keys, P of what a head writes.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.runtime import checks, registration
from mb_kernels.runtime.precision import wide_dtype
from mb_kernels.state_space import reference


def state_space_scan(
    x_BSHP: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    begins_BS: Tensor | None = None,
    *,
    state_BHNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan over sequences, and the state behind their last tokens; differentiable in all.

    Heads g R to (g + 1) R - 1 share group g. Sums are in a fixed order, so results are the same bit
    for bit each time. On a GPU there are kernels for bf16, P up to 64 (an even one up to 128) and N
    up to 128, which multiply in it. All else is plain PyTorch, in fp32.

    Args:
        x_BSHP: [B, S, H, P].
        b_BSGN, c_BSGN: [B, S, G, N] in x's dtype, G a divisor of H.
        dt_BSH: [B, S, H], any floating dtype, at least 0 where it counts: a token of 0 leaves the
            state as it is. In fp32 within.
        A_H, D_H: [H], any floating dtype, A at most 0. In fp32 within.
        begins_BS: [B, S] bool, true where a document begins; None: one a sequence.
        state_BHNP: [B, H, N, P], any floating dtype, before the first tokens; None: zero.

    Returns:
        y_BSHP in x's dtype, and the state [B, H, N, P] in fp32. fp64 of x in fp64.

    Raises:
        ValueError: shapes, dtypes or devices that do not match.
    """
    checks.require_same("x_BSHP", x_BSHP, b_BSGN=b_BSGN, c_BSGN=c_BSGN)
    checks.require_device("x_BSHP", x_BSHP, begins_BS=begins_BS)
    if x_BSHP.ndim != 4 or b_BSGN.ndim != 4 or b_BSGN.shape != c_BSGN.shape:
        raise ValueError(
            "b_BSGN, c_BSGN: expected [sequences, tokens, groups, width] alike, and x of four "
            f"dimensions too; got {tuple(b_BSGN.shape)}, {tuple(c_BSGN.shape)} and "
            f"{tuple(x_BSHP.shape)}."
        )
    (B, S, H, P), (G, N) = x_BSHP.shape, b_BSGN.shape[2:]
    if b_BSGN.shape[:2] != (B, S) or G == 0 or H == 0 or H % G:
        raise ValueError(
            f"b_BSGN: expected [{B}, {S}, a divisor of {H}, N] for x of {tuple(x_BSHP.shape)}, of "
            f"one head at least; got {tuple(b_BSGN.shape)}."
        )
    of_heads = {"dt_BSH": (dt_BSH, (B, S, H)), "A_H": (A_H, (H,)), "D_H": (D_H, (H,))}
    if state_BHNP is not None:
        of_heads["state_BHNP"] = (state_BHNP, (B, H, N, P))
    for name, (tensor, shape) in of_heads.items():
        checks.require_floating(name, tensor)
        checks.require_device("x_BSHP", x_BSHP, **{name: tensor})
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}; got {tuple(tensor.shape)}.")
    if begins_BS is not None and (begins_BS.shape != (B, S) or begins_BS.dtype is not torch.bool):
        raise ValueError(
            f"begins_BS: expected torch.bool {(B, S)}; got {begins_BS.dtype} "
            f"{tuple(begins_BS.shape)}."
        )
    dt, A, D = (tensor.to(wide_dtype(x_BSHP)) for tensor in (dt_BSH, A_H, D_H))
    state = None if state_BHNP is None else state_BHNP.to(wide_dtype(x_BSHP))
    return torch.ops.mb.state_space_scan(x_BSHP, b_BSGN, c_BSGN, dt, A, D, begins_BS, state)


def has_state_space_kernels(device: torch.device, dtype: torch.dtype, P: int, N: int) -> bool:
    """Whether kernels compute a scan of such widths there, not plain PyTorch."""
    if device.type != "cuda":
        return False
    from mb_kernels.runtime.plan import plan_on
    from mb_kernels.state_space.steps import serves

    return serves(plan_on(device, dtype), P, N)


def _fake(x: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (B, H), N, P = x.shape[::2], b.shape[3], x.shape[3]
    return x.new_empty(x.shape), x.new_empty((B, H, N, P), dtype=wide_dtype(x))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: under checkpoint a second reading fails
    *grads, d_first = torch.ops.mb.state_space_scan_backward(dy, d_state, *saved)
    return *grads, None, None if saved[7] is None else d_first


def _backward_fake(dy: Tensor, d_state: Tensor, *given: Any) -> tuple[Tensor, ...]:
    like = (*given[:6], d_state)
    return tuple(tensor.new_empty(tensor.shape) for tensor in like)


def _flops(x: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Of what a token writes into a state and reads from it, not of what chunks add to that."""
    B, S, H, P = x
    return 4 * B * S * H * P * b[3]


registration.register(
    "state_space_scan(Tensor x, Tensor b, Tensor c, Tensor dt, Tensor A, Tensor D, Tensor? begins, "
    "Tensor? state) -> (Tensor, Tensor)",
    reference=reference.forward,
    kernels="mb_kernels.state_space.steps",
    fake=_fake,
    flops=_flops,
    setup_context=_setup,
    backward=_backward,
)
registration.register(
    "state_space_scan_backward(Tensor dy, Tensor d_state, Tensor x, Tensor b, Tensor c, Tensor dt, "
    "Tensor A, Tensor D, Tensor? begins, Tensor? state) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.backward,
    kernels="mb_kernels.state_space.steps",
    fake=_backward_fake,
    flops=lambda dy, d_state, x, b, *_, **__: 2 * _flops(x, b),
)
