"""Routers that choose in other ways: expert choice, Sinkhorn balance, noisy top-k, SparseMixer.

Give one to a layer: `dMoE(config, router=SinkhornRouter(config))`. Only the choice of experts
differs, and with SparseMixer the weights; they get their gradient as with `Router`.

Letters: T tokens, D hidden, E experts, K top-k, C tokens an expert takes, N = E C.
"""

from __future__ import annotations

import mb_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_layers import arguments
from mb_layers.config import MoEConfig, a_config
from mb_layers.linear_fp32 import linear_fp32
from mb_layers.router import Router, RouterOutput, in_int32
from mb_layers.tensors import to_plain, without_autocast


class ExpertChoiceRouter(Router):
    """Each expert takes its best C = ceil(K T / E) tokens (arXiv 2202.09368).

    Load is balanced by construction. A token visits any number of experts, K on average. What a
    token gets depends on the other tokens of the batch, later ones too, so do not use it in a
    causal model whose loss must not see the future. A config with groups, zero experts, a balancing
    bias, renormalized weights, or a balance by scores or over sequences is refused.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse(
            "ExpertChoiceRouter",
            config,
            renormalize=False,
            num_expert_groups=None,
            num_zero_experts=0,
            balancing_bias=False,
            uniform_assignment=False,
            balance_by="visits",
        )
        if config.balance_over == "sequence":
            raise ValueError(
                "expected balance_over='micro_batch' or 'global_batch' for ExpertChoiceRouter, "
                "which chooses tokens for experts, whatever their sequences; got 'sequence'"
            )
        super().__init__(config, device=device, dtype=dtype)

    def forward(
        self,
        x_TD: Tensor,
        *,
        mask_T: Tensor | None = None,
        expert_ids_TK: Tensor | None = None,
    ) -> RouterOutput:
        """Route x_TD [T, D]; see `Router.forward`."""
        if expert_ids_TK is not None:
            return super().forward(x_TD, mask_T=mask_T, expert_ids_TK=expert_ids_TK)
        config = self.config
        with without_autocast(x_TD):
            logits_TE = self.logits(self.jitter(x_TD))
            scores_TE, probs_TE = self.scores(logits_TE)
            choice_TE = self.choice(scores_TE.detach(), logits_TE.detach(), mask_T)
            if mask_T is not None:
                choice_TE = choice_TE.masked_fill(~mask_T[:, None], float("-inf"))
            num_tokens, experts = x_TD.shape[0], config.num_experts
            limit = -(-config.top_k * num_tokens // experts)  # all experts' C is the same
            order_TE = torch.sort(choice_TE, dim=0, descending=True, stable=True).indices
            # Not [:limit], nor reshape below: with a dynamic T torch.export cannot tell that the
            # limit is at most T and never 0.
            place_C = torch.arange(limit, device=x_TD.device)
            tokens_EC = order_TE.T.index_select(1, place_C)
            weights_EC = scores_TE.T.gather(1, tokens_EC) * config.routed_scaling_factor
        ids_EC = torch.arange(experts, device=x_TD.device, dtype=torch.int32)[:, None]
        ids_EC = ids_EC.expand(tokens_EC.shape)
        if mask_T is not None:
            real_limit = -(-config.top_k * mask_T.sum() // experts)
            ids_EC = torch.where(mask_T[tokens_EC] & (place_C < real_limit), ids_EC, -1)
        return RouterOutput(
            weights_EC.flatten()[:, None],
            ids_EC.flatten()[:, None],
            probs_TE,
            logits_TE,
            tokens_EC.flatten(),
        )


class SinkhornRouter(Router):
    """In training the choice is by logits balanced over the batch (S-BASE, arXiv 2202.01169).

    exp(logits) is scaled by rows and columns, in turn, until tokens have equal mass and experts
    too. In eval mode the choice is by the scores. As with expert choice, what a token gets depends
    on the other tokens of the batch in training, if only by what an expert's mass is divided by.
    A token alone has nothing to be balanced with, and chooses by its logits.

    Args:
        iterations: how often rows and columns are scaled. A fixed number, so that the host never
            waits for the device to say whether it was enough. At least 1. Megatron Core goes on
            until the scales move by less than 1e-4, which with large logits they may never do. Of
            4096 tokens with two of 64 experts as many have the same after 8 iterations as there,
            within 0.1 %, for logits of a standard deviation up to 2, within 1 % for 3 and within
            0.1 % after 16 (independent, of low rank, clustered, or with favourites).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        iterations: int = 8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse("SinkhornRouter", config, num_expert_groups=None, balancing_bias=False)
        super().__init__(config, device=device, dtype=dtype)
        arguments.at_least_1(iterations=iterations)
        self.iterations = iterations

    def choice(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return the balanced masses in training."""
        if not self.training:
            return super().choice(scores_TE, logits_TE, mask_T)
        log_TE = logits_TE
        if mask_T is not None:
            log_TE = log_TE.masked_fill(~mask_T[:, None], float("-inf"))
        column_E = log_TE.new_zeros(log_TE.shape[1])
        # Balanced, one token has the same mass for every expert: rounding would choose.
        for _ in range(self.iterations if log_TE.shape[0] > 1 else 0):
            row_T = torch.logsumexp(log_TE - column_E, dim=1, keepdim=True)
            row_T = row_T.masked_fill(row_T == float("-inf"), 0)
            column_E = torch.logsumexp(log_TE - row_T, dim=0)
            # An expert that a bias of -inf closes to all has no mass to be scaled, and gets none.
            column_E = column_E.masked_fill(column_E == float("-inf"), 0)
            # One number for all experts changes no choice, and would grow by log(T / E) each time,
            # until fp32 tells small logits no longer apart.
            column_E = column_E - column_E.mean()
        if mask_T is not None:
            column_E = torch.where(mask_T.sum() > 1, column_E, 0)
        return log_TE - column_E  # a row's own scale changes no choice


class NoisyTopKRouter(Router):
    """Noise on the logits in training, as wide as a learned map says (arXiv 1701.06538, eq. 4).

    logits = x W^T + N(0, 1) softplus(x W_noise^T). Parameter `noise_weight` [E, D], zero at first.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.noise_weight = nn.Parameter(torch.zeros_like(self.weight))

    def reset_parameters(self) -> None:
        """As for the router; the noise's weight is zero."""
        super().reset_parameters()
        if hasattr(self, "noise_weight"):
            nn.init.zeros_(self.noise_weight)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits, with noise in training."""
        logits_TE = super().logits(x_TD)
        if not self.training:
            return logits_TE
        weight_ED = to_plain(self.noise_weight, self.config.num_choices)
        width_TE = F.softplus(linear_fp32(x_TD, weight_ED))
        return logits_TE + torch.randn_like(logits_TE) * width_TE


class SparseMixerRouter(Router):
    """K experts one after the other, each among those that are near the best (arXiv 2409.12136).

    Of the experts that a token has not chosen yet those are near whose logit lacks at most twice
    `tolerance` of the best one, or of its own size if that is larger. A choice's weight is its
    share of a softmax over these, so that a token's weights do not add up to 1: each is 1 where
    none comes near. In eval mode the choice is the best. In training it is drawn by these shares,
    and one that is not the best gives a third of its weight in three of four cases, while its
    gradient stays that of the whole: Heun's third-order method. Phi-3.5-MoE routes so.

    The losses are of a softmax over all experts. A config with sigmoids, groups, a balancing bias,
    renormalized weights or a uniform assignment is refused.

    Args:
        tolerance: 0.01 in Phi-3.5-MoE, which calls it a jitter.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        tolerance: float = 0.01,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse(
            "SparseMixerRouter",
            config,
            score_function="softmax",
            renormalize=False,
            num_expert_groups=None,
            balancing_bias=False,
            uniform_assignment=False,
        )
        super().__init__(config, device=device, dtype=dtype)
        arguments.at_least_0(tolerance=tolerance)
        self.tolerance = tolerance

    def forward(
        self,
        x_TD: Tensor,
        *,
        mask_T: Tensor | None = None,
        expert_ids_TK: Tensor | None = None,
    ) -> RouterOutput:
        """Route x_TD [T, D]; see `Router.forward`."""
        config = self.config
        with without_autocast(x_TD):
            logits_TE = self.logits(self.jitter(x_TD))
            probs_TE = torch.softmax(logits_TE, dim=-1)
            left_TE, ids, weights = logits_TE, [], []
            for k in range(config.top_k):
                near_TE = self._near(left_TE, logits_TE)
                best_T1 = mb_kernels.topk_ids(left_TE.detach(), 1).long()
                if expert_ids_TK is not None:
                    ids_T1 = expert_ids_TK[:, k : k + 1].long()
                else:
                    ids_T1 = self._drawn(near_TE.detach()) if self.training else best_T1
                known_T1 = (ids_T1 >= 0) & (ids_T1 < config.num_choices)
                safe_T1 = torch.where(known_T1, ids_T1, 0)
                weight_T1 = torch.softmax(near_TE, dim=-1).gather(1, safe_T1) * known_T1
                if self.training:
                    weight_T1 = _by_heun(weight_T1, ids_T1 == best_T1)
                left_TE = torch.where(known_T1, left_TE.scatter(1, safe_T1, float("-inf")), left_TE)
                ids.append(ids_T1)
                weights.append(weight_T1)
            weights_TK = torch.cat(weights, dim=1) * config.routed_scaling_factor
        best_TK = None
        if config.balance_by == "scores":
            best_TK = mb_kernels.topk_ids(probs_TE.detach(), config.top_k)
        ids_TK = in_int32(torch.cat(ids, dim=1))
        return RouterOutput(weights_TK, ids_TK, probs_TE, logits_TE, balanced_ids_TK=best_TK)

    def _near(self, left_TE: Tensor, logits_TE: Tensor) -> Tensor:
        """The logits that are left, -inf where they are not near the best."""
        logits_TE = logits_TE.detach()
        best_T1 = left_TE.detach().amax(dim=-1, keepdim=True)
        lacks_TE = (best_T1 - logits_TE) / torch.maximum(logits_TE.abs(), best_T1)
        return left_TE.masked_fill(lacks_TE > 2 * self.tolerance, float("-inf"))

    def _drawn(self, near_TE: Tensor) -> Tensor:
        """An expert of each token by its share of a softmax, [T, 1] (Gumbel's maxima)."""
        return mb_kernels.topk_ids(
            near_TE - torch.empty_like(near_TE).exponential_().log(), 1
        ).long()


def _by_heun(weight_T1: Tensor, is_best_T1: Tensor) -> Tensor:
    """The weight, or a third of it by chance where it is not the best one's; its own gradient."""
    is_whole_T1 = is_best_T1 | (torch.rand_like(weight_T1) > 0.75)
    return weight_T1 - torch.where(is_whole_T1, 0, weight_T1.detach() * (2 / 3))


def _refuse(name: str, config: MoEConfig, **required: object) -> None:
    """Raise for fields that have no meaning for this router and would be ignored silently."""
    a_config(config)
    for field, value in required.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"expected {field}={value} for {name}, which would ignore it; "
                f"got {getattr(config, field)!r}"
            )
