"""Gated short convolutions: what stands in place of attention in most layers of LFM2.

A map of a token's hidden state gives x and two gates, b and c. Each channel of b x is then a
weighted sum of the last few tokens' (`states.short_convolution`), and c of that is mapped back:

    b, c, x = bcx(h)        y = out(c conv(b x))

So a token sees the few before it, and those that they saw in the layers before. By the names of
LFM2: bcx is in_proj, whose rows are all of b, all of c and all of x; conv is conv.conv, out is
out_proj. Nothing here has a bias, nor positions. The channels are divided as attention's heads are,
so that ranks may share them.

Letters: B sequences, S tokens of a sequence, D hidden, H heads, C channels of a head (D / H), T
taps of the convolution, J T - 1 more than S.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from mb_train.models.attention import BlockContext
from mb_train.models.config import TransformerConfig
from mb_train.models.linear import Linear
from mb_train.models.states import ShortConvolution, StateContext, StateCore, short_convolution


class GatedConvolution(nn.Module):
    """A layer of a short convolution, x_BSD to y_BSD, within documents.

    Rows of `bcx` are [H][C of b, C of c, C of x].

    Args:
        config: with `conv_taps`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.conv_taps is not None
        D, H = config.hidden_size, config.num_heads
        self.width = C = D // H
        self.bcx = Linear(D, 3 * D, std=config.init_std, bias=False, fused=(C, C, C))
        self.conv = ShortConvolution(H, C, config.conv_taps)
        self.mixer = ConvolutionCore()
        self.out = Linear(D, D, std=config.output_init_std, bias=False)

    def forward(self, x_BSD: Tensor, context: BlockContext) -> Tensor:
        b, c, x = self.bcx(x_BSD).unflatten(2, (-1, 3, self.width)).unbind(3)
        parts, weights = (b, x, c), self.conv()
        states = context.states or StateContext()
        if context.cache is None:
            y_BSHC = self.mixer(*parts, states, weights=weights)
        else:
            assert context.valid_BS is not None
            y_BSHC = self.mixer.go_on(parts, states, weights, context.cache, context.valid_BS)
        return self.out(y_BSHC.flatten(2))


class ConvolutionCore(StateCore):
    """The convolution between its gates, with no state but the tokens that it sums up.

    Its three tensors are b and x, whose product is convolved, and c, [B, S, H, C].
    """

    convolved = 2

    def behind(
        self,
        channels: Sequence[Tensor],
        gates: Sequence[Tensor],
        context: StateContext,
        weights: tuple[Tensor, ...],
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Of S tokens behind others."""
        (b_BJHC, x_BJHC), (c_BSHC,), (weight_HCT,) = channels, gates, weights
        y_BSHC = short_convolution(b_BJHC * x_BJHC, weight_HCT, context.begins_BS, silu=False)
        return c_BSHC * y_BSHC, state

    def nothing(self, channels: Sequence[Tensor], gates: Sequence[Tensor]) -> Tensor:
        return gates[0].new_zeros(len(gates[0]))
