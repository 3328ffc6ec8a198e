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
a key head (H / G), C width of a key, V of a value, X channels of the convolution, T its taps, K
tokens before a token (T - 1), J K more than S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import TransformerConfig
from mb_train.models.gated_delta import DeltaContext, gated_delta_rule, unit_length
from mb_train.models.linear import Linear

# Of exp(A_log) at the start, evenly spread, as in Megatron Core.
_FADING = (1.0, 16.0)


class Gates(NamedTuple):
    """Of each value head: see the rule."""

    decay_BSH: Tensor
    beta_BSH: Tensor


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
        self.parts, self.per_group = (C, C, R * V), R

        def project(*maps: int, exact: bool = False) -> Linear:
            """To so many rows of each map for a key head: the maps take turns, head by head."""
            rows = G * sum(maps)
            std = config.init_std
            return Linear(hidden, rows, std=std, bias=False, fused=maps, exact=exact)

        self.qkvz = project(*self.parts, R * V)
        self.ba = project(R, R, exact=True)
        self.conv = ShortConvolution(G * sum(self.parts), taps)
        self.gates = DeltaGates(H)
        self.rule = DeltaRule()
        self.norm = GatedNorm(V, config.norm_eps)
        self.out = Linear(H * V, hidden, std=config.output_init_std, bias=False)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        R, values = self.per_group, self.parts[2]
        by_head = self.qkvz(x_BSD).unflatten(2, (-1, sum(self.parts) + values))
        mixed, z = by_head.split([sum(self.parts), values], dim=3)
        b, a = self.ba(x_BSD).unflatten(2, (-1, 2, R)).unbind(3)
        gates = self.gates(b.flatten(2), a.flatten(2))
        computed = self._whole if context.cache is None else self._going_on
        y_BSHV = computed(mixed.flatten(2), gates, context)
        z_BSHV = z.unflatten(3, (R, -1)).flatten(2, 3)
        return self.out(self.norm(y_BSHV, z_BSHV).flatten(2))

    def _whole(self, mixed_BSX: Tensor, gates: Gates, context: BlockContext) -> Tensor:
        """Of sequences from their beginning."""
        delta = context.delta or DeltaContext()
        behind_zeros = F.pad(mixed_BSX, (0, 0, self.conv.taps - 1, 0))
        y_BSHV, _ = self.rule(*self._apart(behind_zeros, delta.begins_BS), gates, delta)
        return y_BSHV

    def _going_on(self, mixed_BSX: Tensor, gates: Gates, context: BlockContext) -> Tensor:
        """Of further tokens of a cache, which holds the last K channels and the state."""
        cache, valid_BS = context.cache, context.valid_BS
        assert cache is not None
        assert valid_BS is not None
        B, _, X = mixed_BSX.shape
        K, H = self.conv.taps - 1, gates.beta_BSH.shape[2]
        tail_BKX, state = cache.held(self) or (
            mixed_BSX.new_zeros(B, K, X),
            gates.beta_BSH.new_zeros(B, H, self.parts[1], self.parts[2] // self.per_group),
        )
        joined = torch.cat([tail_BKX, mixed_BSX], dim=1)
        last_BK = valid_BS.sum(1)[:, None] + torch.arange(K, device=valid_BS.device)
        rows_B1 = torch.arange(B, device=valid_BS.device)[:, None]
        # What a row was filled up with neither fades nor writes.
        gates = Gates(*(gate * valid_BS[..., None] for gate in gates))
        delta = context.delta or DeltaContext()
        y_BSHV, state = self.rule(*self._apart(joined, None), gates, delta, state)
        cache.hold(self, joined[rows_B1, last_BK], state)
        return y_BSHV

    def _apart(self, mixed_BJX: Tensor, begins_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q_BSGC, k_BSGC, v_BSHV of tokens behind K others."""
        by_head = self.conv(mixed_BJX, begins_BS).unflatten(2, (-1, sum(self.parts)))
        q, k, values = by_head.split(list(self.parts), dim=3)
        return q, k, values.unflatten(3, (self.per_group, -1)).flatten(2, 3)


class ShortConvolution(nn.Module):
    """SiLU of each channel's weighted sum over a token and those before it, x_BJX to y_BSX.

    A sum of shifted products in fp32, not `F.conv1d`: what is shifted stays one tensor, and
    products across the beginning of a document are left out. weight [X, T], as of a conv1d: the
    last tap is the token's own.

    Args:
        channels: X.
        taps: T.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels, taps))
        nn.init.uniform_(self.weight, -(taps**-0.5), taps**-0.5)  # as torch's convolutions

    def forward(self, x_BJX: Tensor, begins_BS: Tensor | None) -> Tensor:
        """y_BSX in x's dtype.

        Args:
            x_BJX: K places and the S tokens behind them.
            begins_BS: bool, true where a document begins; None: one a sequence.
        """
        K = self.taps - 1
        S = x_BJX.shape[1] - K
        weight_XT = self.weight.to(torch.promote_types(x_BJX.dtype, torch.float32))
        y_BSX = x_BJX[:, K:] * weight_XT[:, K]
        documents = None if begins_BS is None else F.pad(begins_BS.cumsum(1), (K, 0))
        for tap in range(K):
            product = x_BJX[:, tap : tap + S] * weight_XT[:, tap]
            if documents is not None:
                apart = documents[:, tap : tap + S] != documents[:, K:]
                product = product.masked_fill(apart[..., None], 0)
            y_BSX = y_BSX + product
        return F.silu(y_BSX).to(x_BJX.dtype)


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

    def forward(self, b_BSH: Tensor, a_BSH: Tensor) -> Gates:
        b, a = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (b_BSH, a_BSH))
        # softplus, of whose gradient the compiler of torch 2.13 takes the strides for others.
        steps = torch.logaddexp(a + self.dt_bias, a.new_zeros(()))
        return Gates(-self.A_log.exp() * steps, b.sigmoid())


class DeltaRule(nn.Module):
    """The rule, with queries and keys of length 1: a unit of selective recompute."""

    def forward(
        self,
        q_BSGC: Tensor,
        k_BSGC: Tensor,
        v_BSHV: Tensor,
        gates: Gates,
        context: DeltaContext,
        state_BHCV: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `gated_delta_rule`."""
        q, k = unit_length(q_BSGC), unit_length(k_BSGC)
        return gated_delta_rule(q, k, v_BSHV, *gates, context, state_BHCV=state_BHCV)


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
