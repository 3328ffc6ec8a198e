"""Mamba-2 (arXiv 2405.21060): what stands in place of attention in hybrid models.

Maps of a token's hidden state say what it writes, x, and how large its step is, dt, in each head;
in which direction it writes, b, and reads, c, in each group of heads; and a gate, z. Each channel
of x, b and c is then a weighted sum of the last few tokens', behind SiLU, and

    dt = softplus(dt + dt_bias)        A = -exp(A_log)

are what the state takes (`mb_kernels.state_space_scan`). What it returns is multiplied by SiLU of z
and normed over the width of each group. By the names of mamba-ssm, whose one map and one
convolution are several of ours, so that ranks that share heads have whole rows of each:

    xz, bc, dt      in_proj, whose rows are [z, x, b, c, dt]
    conv, conv_bc   conv1d, whose rows are [x, b, c]
    gates, norm     A_log, D and dt_bias, norm
    out             out_proj

No map has a bias, and there are no positions: the state forgets in order.

Letters: B sequences, S tokens of a sequence, D hidden, H heads, G groups of them, P width of a
head, N of the state's keys, T taps of the convolution, J T - 1 more than S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mb_kernels import state_space_scan
from mb_kernels.state_space import has_state_space_kernels
from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import MambaSizes, TransformerConfig
from mb_train.models.linear import Linear
from mb_train.models.states import (
    ShortConvolution,
    StateContext,
    StateCore,
    short_convolution,
)

# At the start, as in mamba-ssm and Megatron Core: -A evenly spread, steps so by their logarithm.
_FADING = (1.0, 16.0)
_STEPS = (1e-3, 1e-1)


class MambaWeights(NamedTuple):
    """What the core is given beside channels: of each head, and of b and c of each group."""

    conv_HPT: Tensor
    bias_HP: Tensor
    conv_GXT: Tensor
    bias_GX: Tensor
    A_H: Tensor
    D_H: Tensor


def scan_note(sizes: MambaSizes, device: torch.device, dtype: torch.dtype) -> str:
    """What is said of how a run computes the scan."""
    if has_state_space_kernels(device, dtype, sizes.width, sizes.state):
        return "state spaces of Mamba layers: kernels"
    slow = ", which is slow; kernels take bf16, heads and states of 128 at most"
    return f"state spaces of Mamba layers: in plain PyTorch{slow * (device.type == 'cuda')}"


class Mamba2(nn.Module):
    """A layer with a state, x_BSD to y_BSD; a token sees what came before in its document.

    Rows of `xz` are [H][P of x, P of z], those of `bc` [G][N of b, N of c]; those of `conv` and
    `conv_bc` as of the two without z.

    Args:
        config: with `mamba`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.mamba is not None
        H, P, G, N, taps = config.mamba
        hidden, std = config.hidden_size, config.init_std
        self.width, self.common = P, 2 * N
        self.xz = Linear(hidden, H * 2 * P, std=std, bias=False, fused=(P, P))
        self.bc = Linear(hidden, G * 2 * N, std=std, bias=False, fused=(N, N))
        self.dt = Linear(hidden, H, std=std, bias=False, exact=True)
        self.conv = ShortConvolution(H, P, taps, bias=True)
        self.conv_bc = ShortConvolution(G, 2 * N, taps, bias=True)
        self.gates = MambaGates(H)
        self.mixer = MambaCore(N)
        self.norm = GroupNorm(H * P, G, config.norm_eps)
        self.out = Linear(H * P, hidden, std=config.output_init_std, bias=False)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        x_BSHP, z_BSHP = self.xz(x_BSD).unflatten(2, (-1, 2, self.width)).unbind(3)
        bc_BSGX = self.bc(x_BSD).unflatten(2, (-1, self.common))
        dt_BSH, A_H, D_H = self.gates(self.dt(x_BSD))
        parts = (x_BSHP, bc_BSGX, dt_BSH)
        weights = MambaWeights(*self.conv(), *self.conv_bc(), A_H, D_H)
        states = context.states or StateContext()
        if context.cache is None:
            y_BSHP = self.mixer(*parts, states, weights=weights)
        else:
            assert context.valid_BS is not None
            y_BSHP = self.mixer.go_on(parts, states, weights, context.cache, context.valid_BS)
        wide = torch.promote_types(y_BSHP.dtype, torch.float32)
        gated = y_BSHP.to(wide) * F.silu(z_BSHP.to(wide))
        return self.out(self.norm(gated.flatten(2)).to(x_BSD.dtype))


class MambaCore(StateCore):
    """The convolutions and the scan.

    Its three tensors are x [B, S, H, P] and [b, c] [B, S, G, 2 N], which are convolved, and the
    steps [B, S, H]; its weights a `MambaWeights`.

    Args:
        state: N.
    """

    convolved = 2

    def __init__(self, state: int) -> None:
        super().__init__()
        self.state = state

    def behind(
        self,
        channels: Sequence[Tensor],
        gates: Sequence[Tensor],
        context: StateContext,
        weights: tuple[Tensor, ...],
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `state_space_scan`, of S tokens behind K others."""
        of, begins_BS = MambaWeights(*weights), context.begins_BS
        x_BJHP, bc_BJGX = channels
        x_BSHP = short_convolution(x_BJHP, of.conv_HPT, begins_BS, of.bias_HP)
        bc_BSGX = short_convolution(bc_BJGX, of.conv_GXT, begins_BS, of.bias_GX)
        b, c = bc_BSGX.chunk(2, dim=3)
        (dt,) = gates
        return state_space_scan(x_BSHP, b, c, dt, of.A_H, of.D_H, begins_BS, state_BHNP=state)

    def nothing(self, channels: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
        B, _, H, P = channels[0].shape
        return gates[0].new_zeros(B, H, self.state, P)


class MambaGates(nn.Module):
    """Steps, and the rates of heads, in fp32, in which rates far apart do not fall together.

    Args:
        heads: H.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.D = nn.Parameter(torch.ones(heads))
        nn.init.uniform_(self.A_log, *_FADING)
        least, most = _STEPS
        nn.init.uniform_(self.dt_bias, math.log(least), math.log(most))
        with torch.no_grad():
            self.A_log.log_()
            # What softplus makes such steps of.
            self.dt_bias.copy_(self.dt_bias.exp().expm1().log())

    def forward(self, dt_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt_BSH, A_H and D_H; none is a parameter, which a shard has no longer behind this."""
        dt = dt_BSH.to(torch.promote_types(dt_BSH.dtype, torch.float32)) + self.dt_bias
        # softplus, of whose gradient the compiler of torch 2.13 takes the strides for others.
        return torch.logaddexp(dt, dt.new_zeros(())), -self.A_log.exp(), self.D.clone()


class GroupNorm(nn.Module):
    """RMS norm over each of several parts of a width that are equally wide.

    Args:
        size: of all parts.
        groups: how many.
        eps: epsilon.
    """

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.part, self.eps = size // groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (-1, self.part))
        return F.rms_norm(parts, (self.part,), None, self.eps).flatten(-2) * self.weight.to(x.dtype)
