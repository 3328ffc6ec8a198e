"""Linear maps and norms with fp32 parameters that compute in the dtype of their input."""

from __future__ import annotations

import mb_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_train.models.config import TransformerConfig


class Linear(nn.Linear):
    """`nn.Linear` that casts its fp32 parameters to its input's dtype.

    Args:
        inputs, outputs: widths.
        std: standard deviation of the weight at the start.
        bias: whether there is one.
        fused: outputs of each of the maps that it holds, which take turns down the weight's rows;
            () for one map. For whoever treats maps as matrices (`mb_parallel.optimizer.Muon`).
        exact: its products stay in the dtype of its input where those of other maps are in FP8.

    Attributes:
        fp8: its products with the weight are of 8-bit floats, see `mb_kernels.float8_linear`. A
            block says so of all its maps but the `exact` ones.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        std: float,
        bias: bool = True,
        fused: tuple[int, ...] = (),
        exact: bool = False,
    ) -> None:
        self.std, self.fused, self.exact, self.fp8 = std, fused, exact, False
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Weights from N(0, std), bias zero."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        product = mb_kernels.float8_linear if self.fp8 else F.linear
        return product(input, self.weight.to(input.dtype), bias)


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dimension, by the configuration.

    Args:
        config: gives the kind and epsilon; a layer norm may have a bias, an RMS norm has none.
        size: width; None means the hidden size.
        eps: another epsilon than the configuration's.
    """

    bias: nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, size: int | None = None, *, eps: float | None = None
    ) -> None:
        super().__init__()
        self.size = size or config.hidden_size
        self.eps = eps or config.norm_eps
        self.rms = config.norm == "rmsnorm"
        self.weight = nn.Parameter(torch.ones(self.size))
        bias = nn.Parameter(torch.zeros(self.size)) if config.norm == "layernorm" else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.rms:
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
