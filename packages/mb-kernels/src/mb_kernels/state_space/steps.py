"""Launches of the scan's kernels, where they serve; anything else is computed by the reference.

Letters: B sequences, S tokens of a sequence, H heads, G groups of them, N width of a state's keys,
P of what a head writes, M chunks of a sequence.
"""

from typing import Any

import torch
from torch import Tensor

from mb_kernels.runtime.checks import require_countable
from mb_kernels.runtime.launch import cdiv, launch, power_of_two
from mb_kernels.runtime.plan import Plan, plan_of
from mb_kernels.state_space import reference
from mb_kernels.state_space.kernels import (
    state_space_bwd_kernel,
    state_space_bwd_keys_kernel,
    state_space_fwd_kernel,
    states_kernel,
)

# Of P and of N: a program holds states of a chunk in registers. Narrower heads are filled up: with
# tiles of a state that are narrower than high, of 16 or 32 columns, Triton 3.6 reads beyond shared
# memory on Hopper, and all but the first 16 tokens of a chunk are wrong.
_MOST_P, _MOST_N = 64, 128
# Heads of a group whose shares a program adds up, and columns of b and c that it has at most. One
# H200, both directions of 16,384 tokens in 64 heads: 2.08 ms; with 4 heads 2.33, with 32 columns
# 2.47. With more columns registers spill.
_HEADS, _COLUMNS = 8, 64
# Columns of a state that a program takes through the chunks; there, with 16 2.20 ms, with 64 2.09.
_STATE_COLUMNS = 32


def state_space_scan(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, A: Tensor, D: Tensor, begins: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op's implementation, see `reference.forward`."""
    if not _by_kernels(x, b):
        return reference.forward(x, b, c, dt, A, D, begins, state)
    if x.shape[3] > _MOST_P:
        x_of, (dt, A, D) = _halves(x), _twice(dt, A, D)
        state = None if state is None else _state_halves(state)
        y, last = state_space_scan(x_of, b, c, dt, A, D, begins, state)
        return y.view(x.shape), _state_whole(last)
    y = torch.empty_like(x)
    chunks, options = _how(x, b, begins)
    states, last = _states(x, b, dt, A, begins, state, backward=False)
    launch(state_space_fwd_kernel, (chunks * x.shape[0] * x.shape[2],), x, b, c, dt, A, D,
           _some(begins, dt), states, y, x.shape[1], chunks, **options)  # fmt: skip
    return y, last


def state_space_scan_backward(
    dy: Tensor, d_state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, A: Tensor, D: Tensor,
    begins: Tensor | None, state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, see `reference.backward`."""
    (B, S, H, _), G = x.shape, b.shape[2]
    if not _by_kernels(x, b):
        return reference.backward(dy, d_state, x, b, c, dt, A, D, begins, state)
    if x.shape[3] > _MOST_P:
        state = None if state is None else _state_halves(state)
        dx, db, dc, *of_heads, d_first = state_space_scan_backward(
            _halves(dy), _state_halves(d_state), _halves(x), b, c, *_twice(dt, A, D), begins, state
        )
        d_dt, dA, dD = (d.unflatten(-1, (H, 2)).sum(-1) for d in of_heads)
        return dx.view(x.shape), db, dc, d_dt, dA, dD, _state_whole(d_first)
    dx, d_dt = torch.empty_like(x), torch.empty_like(dt)
    chunks, options = _how(x, b, begins)
    states, _ = _states(x, b, dt, A, begins, state, backward=False)
    d_states, d_first = _states(dy, c, dt, A, begins, d_state, backward=True)
    heads = min(H // G, _HEADS)
    parts = cdiv(H // G, heads)
    db, dc = ((b if parts == 1 else dt).new_empty(parts, *b.shape) for _ in range(2))
    dA, dD = (dt.new_empty(B, chunks, H) for _ in range(2))
    begun = _some(begins, dt)
    launch(state_space_bwd_kernel, (chunks * H * B,), dy, x, b, c, dt, A, D, begun, states,
           d_states, dx, d_dt, dA, dD, S, chunks, **options)  # fmt: skip
    options["BLOCK_N"] = min(options["BLOCK_N"], _COLUMNS)
    grid = (chunks * parts * G * B, cdiv(b.shape[3], options["BLOCK_N"]))
    launch(state_space_bwd_keys_kernel, grid, dy, x, b, c, dt, A, begun, states, d_states, db, dc,
           S, chunks, B, HEADS=heads, **options)  # fmt: skip
    db, dc = (d[0] if parts == 1 else d.sum(0).to(b.dtype) for d in (db, dc))
    return dx, db, dc, d_dt, dA.sum((0, 1)), dD.sum((0, 1)), d_first


def _halves(x: Tensor) -> Tensor:
    """Of wide heads: a state's columns know nothing of each other, so a half is a head too."""
    B, S, H, P = x.shape
    return x.view(B, S, 2 * H, P // 2)


def _twice(*of_heads: Tensor) -> tuple[Tensor, ...]:
    return tuple(of_head.repeat_interleave(2, -1) for of_head in of_heads)


def _state_halves(state: Tensor) -> Tensor:
    return state.unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 2).contiguous()


def _state_whole(state: Tensor) -> Tensor:
    return state.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3).contiguous()


def _states(
    values: Tensor, keys: Tensor, dt: Tensor, A: Tensor, begins: Tensor | None,
    first: Tensor | None, *, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[B, H, M, N, P] in front of each chunk, and [B, H, N, P] behind the last; see the kernel."""
    (B, S, H, P), N = values.shape, keys.shape[3]
    chunks, options = _how(values, keys, begins)
    states = values.new_empty(B, H, chunks, N, P)
    last = dt.new_empty(B, H, N, P)
    options["BLOCK_P"] = min(options["BLOCK_P"], _STATE_COLUMNS)
    # A long loop: with one stage more 0.60 ms for 0.70 on an H200. On sm80 a second one spills.
    options["num_stages"] += options["num_stages"] > 1
    grid = (B * H, cdiv(P, options["BLOCK_P"]))
    launch(states_kernel, grid, values, keys, dt, A, _some(begins, dt), _some(first, dt), states,
           last, S, chunks, GIVEN=first is not None, BACKWARD=backward, **options)  # fmt: skip
    return states, last


def _by_kernels(x: Tensor, b: Tensor) -> bool:
    some = x.numel() > 0 and b.numel() > 0
    return some and serves(plan_of(x), x.shape[3], b.shape[3])


def serves(plan: Plan, P: int, N: int) -> bool:
    """Whether the kernels compute with this plan, and such widths."""
    known = plan.dtype is torch.bfloat16 and plan.has("state_space")
    widest = (_MOST_P if P % 2 else 2 * _MOST_P, _MOST_N)
    fits = all(width <= most for width, most in zip((P, N), widest, strict=True))
    return (known or plan.interpreted) and fits


def _some(x: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel that does not read x gets instead of None, which would be code of its own."""
    return other if x is None else x


def _how(x: Tensor, b: Tensor, begins: Tensor | None) -> tuple[int, dict[str, Any]]:
    """Chunks of a sequence; constants and options of a launch."""
    (_, S, H, P), (G, N), plan = x.shape, b.shape[2:], plan_of(x)
    require_countable("tokens of x_BSHP", x.shape[0] * S)
    tile = plan.tile("state_space")
    constants = {
        "H": H,
        "G": G,
        "N": N,
        "P": P,
        "BEGINS": begins is not None,
        "L": tile.block_m,
        "BLOCK_N": max(power_of_two(N), 16),
        "BLOCK_P": _MOST_P,
    }
    return cdiv(S, tile.block_m), constants | tile.launch_options
