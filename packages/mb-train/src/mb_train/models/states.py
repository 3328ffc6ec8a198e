"""What layers with a state share: a short causal convolution, and the core in which tokens meet.

A layer with a state stands in place of attention: each head keeps a matrix of what came before, and
a token changes it and reads from it. There are two kinds, Gated DeltaNet (`models.delta_net`) and
Mamba-2 (`models.mamba`). Both map a token's hidden state to channels and to gates, token by token.
Some of the channels are then weighted sums of a token's and of the few before it, behind SiLU, and
the state goes from token to token. Gated short convolutions (`models.gated_convolution`) have these
sums alone, without SiLU.

Only in these two steps tokens meet. They are one module without parameters of its own, a
`StateCore`, which is given its weights: it is computed again by selective recompute, and exchanges
heads for parts of sequences in context parallelism.

Letters: B sequences, S tokens of a sequence, H heads, X channels of a head, T taps of a
convolution, K tokens before a token (T - 1), J K more than S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.cache import KVCache


class StateContext(NamedTuple):
    """What all layers with a state share.

    begins_BS: bool, true where a document begins, in front of which the state is zero again; None
        if sequences are not divided.
    kernel: of the delta rule, what `delta_kernel` found; a compiled block takes it as it is.
    """

    begins_BS: Tensor | None = None
    kernel: Callable[..., Any] | None = None


def begins_of(segments_BS: Tensor) -> Tensor:
    """Where documents begin behind others, bool, by the number of each token's document."""
    return F.pad(segments_BS[:, 1:] != segments_BS[:, :-1], (1, 0))


class StateCore(nn.Module):
    """Convolutions and the way of the state: the part without parameters.

    It is called with three tensors [B, S, H, ...]: first those of channels that are convolved, then
    gates, with which a token neither changes the state nor lets it fade where they are all 0. Their
    numbers of heads may differ if the largest is a multiple of the others.

    Attributes:
        convolved: how many of the three are convolved.
    """

    convolved: int

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        third: Tensor,
        context: StateContext,
        *,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        """What the state returns, [B, S, heads, width], of sequences from their beginning.

        Args:
            weights: whatever else is a parameter, [H, ...] each; the first is the convolution's of
                the first tensor, [H, X, T].
        """
        tensors, count = (first, second, third), weights[0].shape[2] - 1
        behind_zeros = [F.pad(x, (0, 0, 0, 0, count, 0)) for x in tensors[: self.convolved]]
        y, _ = self.behind(behind_zeros, tensors[self.convolved :], context, weights)
        return y

    def go_on(
        self,
        tensors: Sequence[Tensor],
        context: StateContext,
        weights: tuple[Tensor, ...],
        cache: KVCache,
        valid_BS: Tensor,
    ) -> Tensor:
        """The same of further tokens of a cache, which holds the K last tokens' channels, and the
        state.

        Args:
            valid_BS: bool; the others are what a row was filled up with.
        """
        channels = tensors[: self.convolved]
        # What a row was filled up with neither fades nor writes.
        gates = [gate * valid_BS.view(*valid_BS.shape, *[1] * (gate.ndim - 2))
                 for gate in tensors[self.convolved :]]  # fmt: skip
        *tails, state = cache.held(self) or self._nothing(channels, gates, weights)
        joined = [torch.cat(both, dim=1) for both in zip(tails, channels, strict=True)]
        places_K = torch.arange(tails[0].shape[1], device=valid_BS.device)
        last_BK = valid_BS.sum(1)[:, None] + places_K
        rows_B1 = torch.arange(len(last_BK), device=valid_BS.device)[:, None]
        y, state = self.behind(joined, gates, context, weights, state)
        assert state is not None
        cache.hold(self, *(x[rows_B1, last_BK] for x in joined), state)
        return y

    def behind(
        self,
        channels: Sequence[Tensor],
        gates: Sequence[Tensor],
        context: StateContext,
        weights: tuple[Tensor, ...],
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the state returns of S tokens, and the state behind them.

        Args:
            channels: [B, J, H, X] each, of S tokens behind K others.
            gates: [B, S, H, ...] each.
            state: in front of the S tokens; None: zero, and none is asked for.
        """
        raise NotImplementedError

    def nothing(self, channels: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
        """The state in front of the first token."""
        raise NotImplementedError

    def _nothing(
        self, channels: Sequence[Tensor], gates: Sequence[Tensor], weights: tuple[Tensor, ...]
    ) -> list[Tensor]:
        K = weights[0].shape[2] - 1
        tails = [x.new_zeros(len(x), K, *x.shape[2:]) for x in channels]
        return [*tails, self.nothing(channels, gates)]


def short_convolution(
    x_BJHX: Tensor,
    weight_HXT: Tensor,
    begins_BS: Tensor | None,
    bias_HX: Tensor | None = None,
    *,
    silu: bool = True,
) -> Tensor:
    """SiLU of each channel's weighted sum over a token and the K before it, y_BSHX in x's dtype.

    A sum of shifted products in fp32, not `F.conv1d`: what is shifted stays one tensor, and
    products across the beginning of a document are left out.

    Args:
        x_BJHX: K places and the S tokens behind them.
        weight_HXT: the last tap is the token's own.
        begins_BS: bool, true where a document begins; None: one a sequence.
        bias_HX: is added to the sum.
        silu: False leaves SiLU out.
    """
    K = weight_HXT.shape[2] - 1
    S = x_BJHX.shape[1] - K
    wide = torch.promote_types(x_BJHX.dtype, torch.float32)
    weight_HXT = weight_HXT.to(wide)
    y_BSHX = x_BJHX[:, K:] * weight_HXT[..., K]
    if bias_HX is not None:
        y_BSHX = y_BSHX + bias_HX.to(wide)
    documents = None if begins_BS is None else F.pad(begins_BS.cumsum(1), (K, 0))
    for tap in range(K):
        product = x_BJHX[:, tap : tap + S] * weight_HXT[..., tap]
        if documents is not None:
            apart = documents[:, tap : tap + S] != documents[:, K:]
            product = product.masked_fill(apart[..., None, None], 0)
        y_BSHX = y_BSHX + product
    return (F.silu(y_BSHX) if silu else y_BSHX).to(x_BJHX.dtype)


class ShortConvolution(nn.Module):
    """The weights of a short causal convolution on their way to a core, those of a conv1d.

    Args:
        heads: H.
        channels: X, of each.
        taps: T.
        bias: whether there is one, [H X].
    """

    bias: nn.Parameter | None

    def __init__(self, heads: int, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.empty(heads * channels, taps))
        of_bias = nn.Parameter(torch.empty(heads * channels)) if bias else None
        self.register_parameter("bias", of_bias)
        for parameter in self.parameters():  # as torch's convolutions
            nn.init.uniform_(parameter, -(taps**-0.5), taps**-0.5)

    def forward(self) -> tuple[Tensor, ...]:
        """weight_HXT, and bias_HX if there is one."""
        found = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return tuple(x.unflatten(0, (-1, self.channels)) for x in found)
