"""The experts: E feed-forward networks with their weights stacked, run by one fused op.

Layout, Hugging Face's, so that importing a model is a rename: w1 is [E, F, D], or [E, 2F, D] with
the gate over the up projection for a gated activation; w2 is [E, D, F]. Expert e computes
`activation(x w1_e^T) w2_e^T`.

Letters: E experts, D hidden, F expert ffn width, R tokens on this rank, K top-k.
"""

from __future__ import annotations

import mb_kernels
import torch
from torch import Tensor, nn

from mb_layers.config import MoEConfig
from mb_layers.dispatch import Dispatched


class Experts(nn.Module):
    """Parameters `w1` and `w2`; forward runs the tokens of a `Dispatched` through them."""

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        num_experts, hidden, ffn = config.num_experts, config.hidden_size, config.ffn_hidden_size
        rows = 2 * ffn if config.is_glu else ffn
        self.w1 = nn.Parameter(torch.empty(num_experts, rows, hidden, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, ffn, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w1 from N(0, init_method_std) and w2 from N(0, output_init_std)."""
        config = self.config
        output_std = config.output_init_std
        nn.init.normal_(self.w1, std=config.init_method_std)
        nn.init.normal_(self.w2, std=config.init_method_std if output_std is None else output_std)

    def forward(self, dispatched: Dispatched) -> Tensor:
        """Return y_RD: each token's sum over its experts, weighted by its routing weights."""
        x_RD, w1, w2 = cast_alike(dispatched.x_RD, self.w1, self.w2)
        return mb_kernels.expert_mlp(
            x_RD,
            w1,
            w2,
            dispatched.bins,
            dispatched.weights_RK,
            activation=self.config.activation,
            recompute=self.config.recompute,
        )

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"{config.num_experts} x ({config.hidden_size} -> {config.ffn_hidden_size} -> "
            f"{config.hidden_size}), activation={config.activation!r}"
        )


def cast_alike(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return x and the weights in the dtype to compute in: autocast's if it is on, else that of x.

    So fp32 master weights serve bf16 activations, and get fp32 gradients.
    """
    device_type = x.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
    return tuple(tensor.to(dtype) for tensor in (x, *weights))
