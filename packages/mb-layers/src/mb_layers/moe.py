"""`dMoE` and `MoE`: a Mixture-of-Experts feed-forward for any PyTorch model.

    router -> dispatch -> experts -> combine (-> + shared expert, + bias)

The two layers differ by their dispatcher alone: `dMoE` drops no token (MegaBlocks, arXiv
2211.15841), `MoE` caps the load of an expert. Everything forward computes is returned, nothing is
stored: a layer may run twice (recompute), in parts (gradient accumulation), twice in one process,
or without a backward pass, and no list has to be cleared.

Letters: T tokens, D hidden, E experts, K top-k, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import mb_kernels
import torch
from mb_kernels import RouterLosses
from torch import Tensor, nn

from mb_layers.config import MoEConfig
from mb_layers.dispatch import Dispatched, LocalDispatcher, TokenDispatcher
from mb_layers.experts import Experts, SharedExpert, to_plain
from mb_layers.losses import (
    entropy,
    load_balancing_loss,
    sequence_load_balancing_loss,
    without_autocast,
    z_loss,
)
from mb_layers.router import Router, RouterOutput


class MoEOutput(NamedTuple):
    """What a layer returns.

    y: the shape of x.
    aux_loss: fp32 scalar, the weighted sum of this layer's auxiliary losses; 0 in eval mode. A
        model adds the mean of it over its MoE layers to its loss.
    metrics: detached tensors on the device, reading one is the only sync:
        tokens_per_expert [E] int32: slots routed to each expert, before capacity;
        load_balancing_loss, z_loss: unweighted;
        dropped_fraction: share of the slots that capacity dropped;
        load_imbalance: the fullest expert's load over the mean load, 1 when balanced;
        router_entropy: mean entropy of the router's probabilities in nats, log(E) when uniform.
    """

    y: Tensor
    aux_loss: Tensor
    metrics: dict[str, Tensor]


class _MoELayer(nn.Module):
    """Router, dispatcher and experts; the subclasses choose the dispatcher."""

    bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        dispatcher: TokenDispatcher,
        *,
        reduce_counts: Callable[[Tensor], Tensor] | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if reduce_counts is not None and config.balance_over != "global_batch":
            raise ValueError(
                f"expected reduce_counts=None with balance_over={config.balance_over!r}; "
                "counts are reduced for balance_over='global_batch' alone"
            )
        self.config = config
        self.dispatcher = dispatcher
        self.reduce_counts = reduce_counts
        self.router = Router(config, device=device, dtype=dtype)
        self.experts = Experts(config, device=device, dtype=dtype)
        self.shared_expert = None
        if config.shared_expert_hidden_size is not None:
            self.shared_expert = SharedExpert(config, device=device, dtype=dtype)
        bias = torch.empty(config.hidden_size, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(bias) if config.output_bias else None)
        self._reset_bias()

    def reset_parameters(self) -> None:
        """Initialise every parameter, as after `to_empty` of a layer built on the meta device."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        self._reset_bias()

    def _reset_bias(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> MoEOutput:
        """Run x [..., D] through the layer; leading dimensions are tokens, zero of them is fine.

        The experts compute in x's dtype (autocast's under autocast) whatever the dtype of the
        parameters, the router and the losses in fp32. y has the dtype that the experts compute in.
        """
        if x.dim() == 0 or x.shape[-1] != self.config.hidden_size or not x.is_floating_point():
            raise ValueError(
                f"expected floating-point x of shape [..., {self.config.hidden_size}], "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        x_TD = x.reshape(-1, self.config.hidden_size)
        routed = self.router(x_TD)
        weights_TK = routed.weights_TK
        if self.config.shared_expert_weighted_sum:
            weights_TK = weights_TK * (self.config.top_k / (self.config.top_k + 1))
        dispatched = self.dispatcher.dispatch(x_TD, weights_TK, routed.expert_ids_TK)
        y_TD = self.dispatcher.combine(self.experts(dispatched), dispatched)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        if self.bias is not None:
            y_TD = y_TD + to_plain(self.bias, self.config.hidden_size).to(y_TD.dtype)
        losses = self._losses(routed, dispatched, x.shape)
        aux_loss = losses.aux_loss if self.training else torch.zeros_like(losses.aux_loss.detach())
        metrics = {name: value.detach() for name, value in losses._asdict().items()}
        del metrics["aux_loss"]
        metrics["tokens_per_expert"] = dispatched.tokens_per_expert_E
        return MoEOutput(y_TD.view(x.shape), aux_loss, metrics)

    def _losses(
        self, routed: RouterOutput, dispatched: Dispatched, shape: torch.Size
    ) -> RouterLosses:
        config = self.config
        counts_E = balance_counts_E = dispatched.tokens_per_expert_E
        if self.reduce_counts is not None:
            balance_counts_E = self.reduce_counts(counts_E)
        if config.score_function == "softmax" and config.balance_over != "sequence":
            return mb_kernels.router_losses(
                routed.logits_TE,
                routed.probs_TE.detach(),
                counts_E,
                dispatched.kept_slots,
                load_balancing_weight=config.load_balancing_loss_weight,
                z_weight=config.z_loss_weight,
                balance_counts_E=balance_counts_E,
            )
        with without_autocast(routed.logits_TE):
            if config.balance_over == "sequence":
                # x [..., S, D]: its second-last dimension is the sequence.
                sequences, length = math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1
                balance = sequence_load_balancing_loss(
                    routed.probs_TE.view(sequences, length, config.num_experts),
                    routed.expert_ids_TK.view(sequences, length, config.top_k),
                )
            else:
                balance = load_balancing_loss(routed.probs_TE, balance_counts_E, config.top_k)
            z = z_loss(routed.logits_TE)
            slots = max(routed.expert_ids_TK.numel(), 1)
            return RouterLosses(
                aux_loss=config.load_balancing_loss_weight * balance + config.z_loss_weight * z,
                load_balancing_loss=balance,
                z_loss=z,
                router_entropy=entropy(routed.probs_TE.detach()),
                load_imbalance=counts_E.max() * config.num_experts / slots,
                dropped_fraction=(counts_E.sum() - dispatched.kept_slots) / slots,
            )


class dMoE(_MoELayer):  # noqa: N801, the paper's name
    """Dropless MoE: every token reaches its K experts, whatever the load.

    Args:
        config: with `capacity_factor=None`.
        dispatcher: None computes in this process; a dispatcher of a parallel library spreads the
            experts over ranks.
        reduce_counts: for `balance_over="global_batch"`: takes this micro-batch's tokens per expert
            [E] and returns those of the global batch, for instance by an all-reduce over the
            data-parallel ranks, plus the counts of the step's earlier micro-batches. None: the
            micro-batch is the global batch.
        device, dtype: of the parameters, as for `nn.Linear`.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dispatcher: TokenDispatcher | None = None,
        reduce_counts: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if config.capacity_factor is not None:
            raise ValueError(
                f"expected capacity_factor=None, got {config.capacity_factor}: dMoE drops no "
                "token; to cap the load of an expert use MoE"
            )
        dispatcher = dispatcher or LocalDispatcher(config.num_experts)
        super().__init__(
            config, dispatcher, reduce_counts=reduce_counts, device=device, dtype=dtype
        )


class MoE(_MoELayer):
    """MoE with expert capacity: an expert drops its slots beyond ceil(capacity_factor K T / E).

    A dropped slot adds nothing to its token's output, and the token's other weights stay as they
    are; a token with all slots dropped gets zero, so use the layer under a residual connection.

    Args: as for `dMoE`, `config.capacity_factor` is required.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dispatcher: TokenDispatcher | None = None,
        reduce_counts: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if config.capacity_factor is None:
            raise ValueError(
                "expected a capacity_factor > 0, got None; 1.0 gives every expert its even share, "
                "and a layer that drops no token is dMoE"
            )
        dispatcher = dispatcher or LocalDispatcher(
            config.num_experts, config.capacity_factor, drop_policy=config.drop_policy
        )
        super().__init__(
            config, dispatcher, reduce_counts=reduce_counts, device=device, dtype=dtype
        )
