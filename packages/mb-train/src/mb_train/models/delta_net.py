"""Gated DeltaNet (arXiv 2412.06464): what stands in place of attention in layers with a state.

Queries, keys and values are maps of the hidden state, each channel of which is then a weighted sum
of its last few tokens' (a short causal convolution) behind SiLU. Queries and keys have length 1.
Two gates of each value head say what remains of its state and how much a token writes:

    decay = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b)

What the state returns (`gated_delta`) is normed by head and multiplied by SiLU of a further map, z.
By the names of Qwen3-Next, whose rows ours are, but for those of the convolution:

    qkvz, ba        in_proj_qkvz, in_proj_ba
    conv            conv1d, whose rows are those of all heads' queries, of all keys, of all values
    gates, norm     A_log and dt_bias, norm
    out             out_proj

Nothing here has a bias, nor positions: the state forgets in order.

Letters: B sequences, S tokens of a sequence, D hidden, G key heads, H value heads, R value heads of
a key head (H / G), C width of a key, V of a value, X a key head's channels of the convolution (2 C
+ R V), T its taps, J T - 1 more than S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import TransformerConfig
from mb_train.models.gated_delta import gated_delta_rule, unit_length
from mb_train.models.linear import Linear
from mb_train.models.states import (
    ShortConvolution,
    StateContext,
    StateCore,
    short_convolution,
)

# Of exp(A_log) at the start, evenly spread, as in Megatron Core.
_FADING = (1.0, 16.0)


class Gates(NamedTuple):
    """Of each value head: see the rule."""

    decay_BSGR: Tensor
    beta_BSGR: Tensor


class GatedDeltaNet(nn.Module):
    """A layer with a state, x_BSD to y_BSD; a token sees what came before in its document.

    Rows of `qkvz` are [G][C of the query, C of the key, R V of the values, R V of z], those of `ba`
    [G][R of b, R of a], those of `conv` as of `qkvz` without z.

    Args:
        config: with `delta`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.delta is not None
        G, H, C, V, taps = config.delta
        hidden, R = config.hidden_size, H // G
        self.channels, self.values, self.per_group = 2 * C + R * V, R * V, R

        def project(*maps: int, exact: bool = False) -> Linear:
            """To so many rows of each map for a key head: the maps take turns, head by head."""
            rows = G * sum(maps)
            std = config.init_std
            return Linear(hidden, rows, std=std, bias=False, fused=maps, exact=exact)

        self.qkvz = project(C, C, R * V, R * V)
        self.ba = project(R, R, exact=True)
        self.conv = ShortConvolution(G, self.channels, taps)
        self.gates = DeltaGates(H)
        self.mixer = DeltaCore(C, V)
        self.norm = GatedNorm(V, config.norm_eps)
        self.out = Linear(H * V, hidden, std=config.output_init_std, bias=False)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        by_head = self.qkvz(x_BSD).unflatten(2, (-1, self.channels + self.values))
        mixed_BSGX, z = by_head.split([self.channels, self.values], dim=3)
        b, a = self.ba(x_BSD).unflatten(2, (-1, 2, self.per_group)).unbind(3)
        parts, weights = (mixed_BSGX, *self.gates(b, a)), self.conv()
        states = context.states or StateContext()
        if context.cache is None:
            y_BSHV = self.mixer(*parts, states, weights=weights)
        else:
            assert context.valid_BS is not None
            y_BSHV = self.mixer.go_on(parts, states, weights, context.cache, context.valid_BS)
        z_BSHV = z.unflatten(3, (self.per_group, -1)).flatten(2, 3)
        return self.out(self.norm(y_BSHV, z_BSHV).flatten(2))


class DeltaCore(StateCore):
    """The convolution and the rule, with queries and keys of length 1.

    Its three tensors are what is convolved [B, S, G, X], of each key head [query, key, values], and
    the gates.

    Args:
        key: C.
        value: V.
    """

    convolved = 1

    def __init__(self, key: int, value: int) -> None:
        super().__init__()
        self.key, self.value = key, value

    def behind(
        self,
        channels: Sequence[Tensor],
        gates: Sequence[Tensor],
        context: StateContext,
        weights: tuple[Tensor, ...],
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `gated_delta_rule`, of S tokens behind K others."""
        (mixed_BJGX,), (weight_GXT,) = channels, weights
        by_head = short_convolution(mixed_BJGX, weight_GXT, context.begins_BS)
        q, k, values = by_head.tensor_split([self.key, 2 * self.key], dim=3)
        v_BSHV = values.unflatten(3, (-1, self.value)).flatten(2, 3)
        decay, beta = (gate.flatten(2) for gate in gates)
        q, k = unit_length(q), unit_length(k)
        return gated_delta_rule(q, k, v_BSHV, decay, beta, context, state_BHCV=state)

    def nothing(self, channels: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
        B, _, G, R = gates[1].shape
        return gates[1].new_zeros(B, G * R, self.key, self.value)


class DeltaGates(nn.Module):
    """What remains of a state, and how much is written, in fp32.

    The rates at which heads fade are wide apart, and their exponentials more so: 16 bits would not
    tell them, so neither these parameters nor what is computed of them is ever rounded.

    Args:
        heads: H.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        nn.init.ones_(self.dt_bias)
        nn.init.uniform_(self.A_log, *_FADING)
        with torch.no_grad():
            self.A_log.log_()

    def forward(self, b_BSGR: Tensor, a_BSGR: Tensor) -> Gates:
        b, a = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (b_BSGR, a_BSGR))
        A_log, dt_bias = (x.view(a.shape[2:]) for x in (self.A_log, self.dt_bias))
        # softplus, of whose gradient the compiler of torch 2.13 takes the strides for others.
        steps = torch.logaddexp(a + dt_bias, a.new_zeros(()))
        return Gates(-A_log.exp() * steps, b.sigmoid())


class GatedNorm(nn.Module):
    """RMS norm over the last dimension, times SiLU of a gate, which is in fp32.

    Args:
        size: width.
        eps: epsilon.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        wide = torch.promote_types(gate.dtype, torch.float32)
        return (normed * F.silu(gate.to(wide))).to(x.dtype)
