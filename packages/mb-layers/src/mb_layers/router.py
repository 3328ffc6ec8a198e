"""The router: which K experts each token visits, and with what weights.

Logits are x W^T, in fp32 by default: the choice of experts is a comparison, and bf16 logits tie.
Softmax routing goes through one fused op, `mb_kernels.topk_softmax`. The other variants (sigmoid
scores, expert groups, a balancing bias) are plain PyTorch around `mb_kernels.topk_ids`: scores
decide the weights, scores plus bias decide the choice, and equal scores go to the lower expert id.

The balancing bias (arXiv 2408.15664, as in DeepSeek-V3) steers load without a loss. Forward never
moves it: a forward pass may run twice under recompute, or without a step after it. The trainer
calls `update_balancing_bias` once per optimizer step with the counts that `MoEOutput.metrics` gave.

Letters: T tokens, D hidden, E experts, K top-k, G expert groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import mb_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mb_layers import arguments
from mb_layers.config import MoEConfig, a_config
from mb_layers.linear_fp32 import linear_fp32
from mb_layers.tensors import at_least_fp32, draw, to_plain, without_autocast


class RouterOutput(NamedTuple):
    """What the router decided: within a token the best choice first, or the caller's ids in order.

    weights_TK: fp32, with gradient.
    expert_ids_TK: int32; -1 is no expert.
    probs_TE: fp32 [T, E], rows sum to 1, with gradient: the load-balancing loss reads them. A
        routing without probabilities, None, has no load-balancing loss.
    logits_TE: fp32, with gradient: the z-loss reads them. None: there is no z-loss.
    token_ids_N: for routers that choose tokens for experts: weights and ids are then [N, 1], and
        their row n is of token token_ids_N[n]. None: row t is of token t.
    balanced_ids_TK: int32, the experts that the load-balancing loss counts, -1 for none; needed
        with `balance_by="scores"`. None: those of expert_ids_TK.
    """

    weights_TK: Tensor
    expert_ids_TK: Tensor
    probs_TE: Tensor | None
    logits_TE: Tensor | None
    token_ids_N: Tensor | None = None
    balanced_ids_TK: Tensor | None = None


class Router(nn.Module):
    """A linear map to E logits and the choice of the best K. Parameter `weight` is [E, D].

    With `config.router_bias` there is a parameter `bias` [E], with `config.balancing_bias` a
    persistent fp32 buffer `balancing_bias` [E].
    """

    bias: nn.Parameter | None
    balancing_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        a_config(config)
        self.config = config
        choices = config.num_choices
        self.weight = nn.Parameter(
            torch.empty(choices, config.hidden_size, device=device, dtype=dtype)
        )
        bias = torch.empty(choices, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(bias) if config.router_bias else None)
        balancing_bias = torch.empty(choices, device=device, dtype=torch.float32)
        self.register_buffer("balancing_bias", balancing_bias if config.balancing_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, init_method_std) and zero both biases."""
        draw(self.weight, partial(nn.init.normal_, std=self.config.init_method_std))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.balancing_bias is not None:
            nn.init.zeros_(self.balancing_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module as `nn.Module` does, but keep the balancing bias in fp32.

        In bf16 a bias near 1 moves in steps of 0.004: steps of 1e-3 would be rounded away.
        """
        before = self.balancing_bias
        super()._apply(fn, recurse)
        after = self.balancing_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.balancing_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as `nn.Module` does; what `assign=True` puts in the bias's place is fp32 too."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.balancing_bias is not None:
            self.balancing_bias = self.balancing_bias.float()

    def forward(
        self,
        x_TD: Tensor,
        *,
        mask_T: Tensor | None = None,
        expert_ids_TK: Tensor | None = None,
    ) -> RouterOutput:
        """Route x_TD [T, D] of any floating dtype.

        Args:
            mask_T: bool [T], False for padding; the layer sees to it that padding visits no expert.
            expert_ids_TK: the experts to visit, chosen elsewhere (replay, hashing): this router
                gives the weights, those of its own choice if `uniform_assignment` is set. An id of
                no expert has weight 0 otherwise.

        Raises:
            ValueError: tokens of another shape, or a subclass's choice of one.
        """
        config = self.config
        # Where slots are assigned uniformly, by whomever, their weights are those of the choice.
        chooses = expert_ids_TK is None or config.uniform_assignment
        # Autocast would take the product back to low precision.
        with without_autocast(x_TD):
            logits_TE = self.logits(self.jitter(x_TD))
            if chooses and self._is_plain_softmax():
                weights_TK, ids_TK, probs_TE = mb_kernels.topk_softmax(
                    logits_TE, config.top_k, renormalize=config.renormalize
                )
                best_TK = ids_TK
            else:
                scores_TE, probs_TE = self.scores(logits_TE)
                best_TK = None
                if config.balance_by == "scores":
                    best_TK = mb_kernels.topk_ids(scores_TE.detach(), config.top_k)
                if chooses:
                    choice_TE = self.choice(scores_TE.detach(), logits_TE.detach(), mask_T)
                    if choice_TE.shape != scores_TE.shape:  # else ids of experts that are none
                        raise ValueError(
                            f"expected a choice of shape {tuple(scores_TE.shape)}, a number for "
                            f"each expert, got {tuple(choice_TE.shape)}"
                        )
                    ids_TK = mb_kernels.topk_ids(choice_TE, config.top_k)
                    weights_TK = self.weights(scores_TE.gather(1, ids_TK.long()))
                else:
                    assert expert_ids_TK is not None
                    ids_TK = expert_ids_TK.long()
                    known_TK = (ids_TK >= 0) & (ids_TK < config.num_choices)
                    chosen_TK = scores_TE.gather(1, torch.where(known_TK, ids_TK, 0))
                    weights_TK = self.weights(chosen_TK * known_TK)
            if config.routed_scaling_factor != 1.0:
                weights_TK = weights_TK * config.routed_scaling_factor
        if config.uniform_assignment and expert_ids_TK is not None:
            ids_TK = expert_ids_TK
        elif config.uniform_assignment:
            slots_N = torch.arange(ids_TK.numel(), device=ids_TK.device, dtype=torch.int32)
            ids_TK = (slots_N % config.num_experts).view_as(ids_TK)
        balanced_TK = best_TK if config.balance_by == "scores" else None
        return RouterOutput(
            weights_TK, in_int32(ids_TK), probs_TE, logits_TE, balanced_ids_TK=balanced_TK
        )

    def _is_plain_softmax(self) -> bool:
        # A method: torch 2.11's compiler follows no property of a parent class.
        config = self.config
        return (
            is_ours(self, "scores", "choice", "weights")
            and config.score_function == "softmax"
            and config.num_expert_groups is None
            and not config.balancing_bias
            and not (config.renormalize and config.renormalize_p != 1)
        )

    def jitter(self, x_TD: Tensor) -> Tensor:
        """Return what the router sees of the tokens: in training, with `jitter_eps`, noise on x.

        Noisy tokens are fp32 at least, but with `router_fp32=False` those that came.
        """
        eps = self.config.jitter_eps
        if not self.training or not eps:
            return x_TD
        # In bf16 the noise of eps 0.01 would be four numbers of mean 0.994, that of 0.003 a
        # constant, and that of 0.001 none; and its product with x would be rounded as coarsely.
        wide_TD = at_least_fp32(x_TD)
        noisy_TD = wide_TD * torch.empty_like(wide_TD).uniform_(1 - eps, 1 + eps)
        return noisy_TD if self.config.router_fp32 else noisy_TD.to(x_TD.dtype)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits [T, E] of x_TD, at least fp32; ValueError for another shape."""
        choices = self.config.num_choices
        if x_TD.dim() != 2 or x_TD.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"expected x_TD of shape [T, {self.config.hidden_size}], got {tuple(x_TD.shape)}"
            )
        weight_ED = to_plain(self.weight, choices)
        if self.config.router_fp32:
            logits_TE = linear_fp32(x_TD, weight_ED)
        else:
            logits_TE = at_least_fp32(F.linear(x_TD, weight_ED.to(x_TD.dtype)))
        if self.bias is None:
            return logits_TE
        return logits_TE + at_least_fp32(to_plain(self.bias, choices))

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores that weights are taken from, and the probabilities of the losses."""
        if self.config.score_function == "softmax":
            probs_TE = torch.softmax(logits_TE, dim=-1)
            return probs_TE, probs_TE
        # Sigmoids over their sum, where they all underflow too.
        return torch.sigmoid(logits_TE), torch.softmax(F.logsigmoid(logits_TE), dim=-1)

    def choice(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
        """Return the scores plus bias, [T, E], by which the best K are chosen.

        A subclass may return others, but not change these in place: weights are taken from them.
        """
        if self.balancing_bias is not None:
            scores_TE = scores_TE + self.balancing_bias
        if self.config.num_expert_groups is not None:
            scores_TE = self._mask_groups(scores_TE)
        return scores_TE

    def weights(self, chosen_TK: Tensor) -> Tensor:
        """Return the routing weights [T, K] from the chosen experts' scores."""
        config = self.config
        if not config.renormalize:
            return chosen_TK
        norm_T1 = torch.linalg.vector_norm(
            chosen_TK, ord=config.renormalize_p, dim=-1, keepdim=True
        )
        # A token's norm is 0 if all its scores underflow or none belongs to an expert. With 1e-20,
        # as in DeepSeek-V3, the gradient is finite, and what it is multiplied by makes it 0.
        return chosen_TK / norm_T1.clamp(min=1e-20)

    def _mask_groups(self, choice_TE: Tensor) -> Tensor:
        """Set the scores outside each token's best groups to -inf."""
        config = self.config
        assert config.num_expert_groups is not None
        assert config.top_k_groups is not None
        num_groups = config.num_expert_groups
        choice_TGe = choice_TE.unflatten(1, (num_groups, config.num_experts // num_groups))
        group_TG = choice_TGe.topk(config.group_score_top, dim=-1).values.sum(dim=-1)
        best_TG = mb_kernels.topk_ids(group_TG, config.top_k_groups).long()
        closed_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, best_TG, False)
        return choice_TGe.masked_fill(closed_TG[..., None], float("-inf")).view_as(choice_TE)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"{config.hidden_size} -> {config.num_choices}, top_k={config.top_k}, "
            f"score_function={config.score_function!r}, renormalize={config.renormalize}"
        )


def in_int32(ids_TK: Tensor) -> Tensor:
    """The ids in int32. Those beyond it stay ids of no expert: a cast would make 0 of 2**32."""
    if ids_TK.dtype == torch.int32:
        return ids_TK
    most = torch.iinfo(torch.int32).max
    return ids_TK.clamp(min=-most, max=most).int()


def is_ours(router: nn.Module, *methods: str) -> bool:
    """Whether a router does these steps as `Router` does, not as a subclass or another module.

    Nor as a function that somebody has put in a method's place on this router alone.
    """
    return all(
        getattr(type(router), name, None) is getattr(Router, name) and name not in router.__dict__
        for name in methods
    )


def balancing_bias_of(router: nn.Module) -> Tensor | None:
    """A router's balancing bias, also of one inside a wrapper, as `torch.compile` and PEFT make."""
    biases = (getattr(module, "balancing_bias", None) for module in router.modules())
    return next((bias_E for bias_E in biases if bias_E is not None), None)


@torch.no_grad()
def update_balancing_bias(router: nn.Module, tokens_per_expert_E: Tensor, *, rate: float) -> None:
    """Move the balancing bias one step: overloaded experts down by `rate`, the others up.

    Call it once per optimizer step, with `metrics["tokens_per_expert"]` summed over the step's
    micro-batches and over the ranks that hold copies of this router: then every copy moves alike.
    The step is recentred to mean zero, which changes no choice and keeps the bias from drifting.

    Args:
        router: a layer's `.router`, its config with `balancing_bias=True`; changed in place.
        tokens_per_expert_E: counts [E], any dtype.
        rate: the step, 1e-3 in the paper.

    Raises:
        ValueError: a router without a balancing bias, counts of another shape, or a rate that is
            no number of at least 0.
    """
    arguments.a_module(router=router)
    bias_E = balancing_bias_of(router)
    if bias_E is None:
        raise ValueError(
            "expected a router with a balancing bias, got one without; "
            "build the layer with MoEConfig(balancing_bias=True)"
        )
    arguments.at_least_0(rate=rate)
    counts = tokens_per_expert_E
    if not isinstance(counts, Tensor) or counts.shape != bias_E.shape:
        raise ValueError(
            f"expected tokens_per_expert_E of shape {tuple(bias_E.shape)}, got "
            f"{arguments.described(counts)}"
        )
    # The counts of a large batch and their sum are beyond 2^24, where fp32 takes a load that is the
    # mean for another.
    counts_E = counts.to(bias_E.device, torch.float64)
    step_E = rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
    bias_E += step_E - step_E.mean()
