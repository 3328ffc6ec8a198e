"""Compiles a layer's kernels in parallel, before its first call."""

from __future__ import annotations

from concurrent.futures import Future

import mb_kernels
import torch

from mb_layers.arguments import at_least_1
from mb_layers.config import MoEConfig, a_config


def warm_up(
    config: MoEConfig,
    *,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    parameter_dtype: torch.dtype = torch.float32,
    ranks: int = 1,
    device: torch.device | str | None = None,
) -> Future[int]:
    """Start to compile the kernels that a layer launches in training.

    Args:
        config: of the layer.
        tokens: of one call.
        dtype: to compute in.
        parameter_dtype: of the layer's parameters.
        ranks: over which its experts are spread.
        device: of the layer; None is the current GPU.

    Returns:
        A future of the number of kernels, see `mb_kernels.warm_up`; 0 for experts that do not run
        as one op, block-sparse ones and those that keep quantized activations, and for more ranks
        than experts.

    Raises:
        ValueError: no config, `tokens` that are no integer of at least 1, and as
            `mb_kernels.warm_up`.
    """
    a_config(config)
    at_least_1(tokens=tokens)
    alone = config.mlp_impl == "grouped" and config.saved_activation_bits is None
    if not alone or config.num_experts % max(ranks, 1):  # ranks below 1 are refused below
        nothing: Future[int] = Future()
        nothing.set_result(0)
        return nothing
    return mb_kernels.warm_up(
        tokens=tokens,
        hidden_size=config.experts_hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activation=config.activation,
        dtype=dtype,
        bias_dtype=parameter_dtype if config.mlp_bias else None,
        score_function=config.score_function,
        renormalize=config.renormalize,
        recompute=config.recompute,
        fp8=config.fp8,
        ranks=ranks,
        device=device,
    )
