"""`dMoE` and `MoE`: a Mixture-of-Experts feed-forward for any PyTorch model.

    router (-> down) -> dispatch -> experts -> combine (-> up) (-> + shared expert, + bias)

The two layers differ by their dispatcher alone: `dMoE` drops no token (MegaBlocks, arXiv
2211.15841), `MoE` caps the load of an expert. Everything forward computes is returned, nothing is
stored: a layer may run twice (recompute), in parts (gradient accumulation), twice in one process,
or without a backward pass, and no list has to be cleared.

Letters: T tokens, D hidden, E experts, K top-k, B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mb_kernels
import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from mb_layers.arguments import a_module, as_mask, described
from mb_layers.balance import router_losses
from mb_layers.config import MoEConfig, a_config
from mb_layers.dispatch import Dispatched, LocalDispatcher, TokenDispatcher, replaced
from mb_layers.experts import Experts, LatentMap, SharedExpert
from mb_layers.losses import reduced
from mb_layers.routed import run_routed
from mb_layers.router import Router, RouterOutput, is_ours
from mb_layers.tensors import at_least_fp32, is_dtensor, to_plain

# A private name of torch, whose public call sets such hooks but does not tell of them.
_hooks_of_all_modules = getattr(nn.modules.module, "_global_forward_hooks", {})


class MoEOutput(NamedTuple):
    """What a layer returns.

    y: the shape of x.
    aux_loss: fp32 scalar, the weighted sum of this layer's auxiliary losses; 0 in eval mode. A
        model adds the mean of it over its MoE layers to its loss.
    metrics: detached tensors on the device, reading one is the only sync:
        tokens_per_expert [E] int32: slots routed to each expert, before capacity;
        load_balancing_loss, z_loss: unweighted;
        dropped_fraction: share of the slots that no expert computed: those beyond capacity, and
            those to which a router of your own gave an id that no expert has;
        load_imbalance: the fullest expert's load over the mean load, 1 when balanced;
        router_entropy: mean entropy of the router's probabilities in nats, log(E) when uniform.
    """

    y: Tensor
    aux_loss: Tensor
    metrics: dict[str, Tensor]


# So that torch.export can save a program that takes or returns one.
_register_namedtuple(MoEOutput, serialized_type_name="mb_layers.MoEOutput")
_register_namedtuple(RouterOutput, serialized_type_name="mb_layers.RouterOutput")
torch.serialization.add_safe_globals([RouterOutput])  # the inputs are saved with the program


class MoELayer(nn.Module):
    """Router, dispatcher and experts; the subclasses say which configs are theirs."""

    bias: nn.Parameter | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        dispatcher: TokenDispatcher | None = None,
        router: nn.Module | None = None,
        reduce_counts: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        a_config(config)
        self._check(config)
        is_wide = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if not (dtype is None or is_wide):
            raise ValueError(f"expected a floating-point dtype of 16 bits or more, got {dtype!r}")
        if router is not None:
            a_module(router=router)
        if reduce_counts is not None and config.balance_over != "global_batch":
            raise ValueError(
                f"expected reduce_counts=None with balance_over={config.balance_over!r}; "
                "counts are reduced for balance_over='global_batch' alone"
            )
        if dispatcher is not None and not hasattr(dispatcher, "dispatch"):
            raise ValueError(
                f"expected a TokenDispatcher, got {dispatcher!r}; to spread the experts over ranks "
                "pass none, and the model to mb_parallel.parallelize_experts"
            )
        self.config = config
        self.dispatcher = dispatcher or _local(config, config.capacity_factor)
        self.eval_dispatcher: TokenDispatcher | None = None
        if config.eval_capacity_factor is not None and dispatcher is None:
            self.eval_dispatcher = _local(config, config.eval_capacity_factor)
        self.reduce_counts = reduce_counts
        self.router = Router(config, device=device, dtype=dtype) if router is None else router
        self.experts = Experts(config, device=device, dtype=dtype)
        self.latent_down = self.latent_up = None
        if config.latent_size is not None:
            widths = (config.hidden_size, config.latent_size)
            self.latent_down = LatentMap(*widths, config.init_method_std, device, dtype)
            self.latent_up = LatentMap(*reversed(widths), config.output_std, device, dtype)
        self.shared_expert = None
        if config.shared_expert_hidden_size is not None:
            self.shared_expert = SharedExpert(config, device=device, dtype=dtype)
        bias = torch.empty(config.hidden_size, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(bias) if config.output_bias else None)
        self._reset_bias()

    def _check(self, config: MoEConfig) -> None:
        """Raise ValueError for a config of the other layer."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise every parameter, as after `to_empty` of a layer built on the meta device."""
        for module in self.router.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        self.experts.reset_parameters()
        for module in (self.latent_down, self.latent_up, self.shared_expert):
            if module is not None:
                module.reset_parameters()
        self._reset_bias()

    def _reset_bias(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        config = self.config
        parts = [f"{config.hidden_size} -> {config.ffn_hidden_size} -> {config.hidden_size}"]
        if config.capacity_factor is not None:
            parts.append(f"capacity_factor={config.capacity_factor}")
            parts.append(f"drop_policy={config.drop_policy!r}")
        parts.append(f"load_balancing_loss_weight={config.load_balancing_loss_weight}")
        return ", ".join(parts)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        valid_tokens: Tensor | float | None = None,
        routing: Tensor | RouterOutput | None = None,
    ) -> MoEOutput:
        """Run x [..., D] through the layer. Leading dimensions are tokens; there may be none.

        The experts compute in x's dtype (autocast's under autocast, except for fp64) whatever the
        dtype of the parameters, the router and the losses in fp32. y has the experts' dtype.

        Args:
            x: [..., D].
            mask: [...], bool or integer, nonzero for real tokens as in `attention_mask`. Padding
                visits no expert and its output is 0. It is not counted, neither in metrics nor for
                capacity, not exchanged, and in no loss: losses are means over the real tokens.
            valid_tokens: divide the losses by this number of tokens, a number or a scalar tensor.
                Ranks, or micro-batches, with uneven numbers of real tokens pass the mean of these
                numbers: then every token weighs the same in the mean of their losses.
            routing: integer expert ids [..., K] chosen elsewhere (a rollout's routing, a hash), -1
                for none; the router still gives the weights. Or a whole `RouterOutput`: then the
                router does not run.

        Raises:
            ValueError: x of another width or dtype, a mask or routing of another shape or dtype,
                `valid_tokens` below 0 or not one number, a router that returns something else.
        """
        x_TD, mask_T = self._tokens(x, mask)
        if routing is not None and not isinstance(routing, RouterOutput):
            routing = _flat_ids(routing, x, self.config.top_k)
        routed = self._route(x_TD, mask_T, routing)
        dispatcher = self.dispatcher
        if not self.training and self.eval_dispatcher is not None:
            dispatcher = self.eval_dispatcher
        rows_TD = x_TD if self.latent_down is None else self.latent_down(x_TD)
        y_TD, dispatched = run_routed(rows_TD, routed, self.config, dispatcher, self.experts)
        if self.latent_up is not None:
            y_TD = self.latent_up(y_TD)
        y_TD = self._add_unrouted(x_TD, y_TD, mask_T)
        aux_loss, metrics = self._report(routed, dispatched, x.shape, mask_T, valid_tokens, routing)
        return MoEOutput(y_TD if x.dim() == 2 else y_TD.view(x.shape), aux_loss, metrics)

    def route(self, x: Tensor, *, mask: Tensor | None = None) -> RouterOutput:
        """Return what the router chooses for x [..., D]; `mask` and ValueError as in forward."""
        return self._route(*self._tokens(x, mask), None)

    def _tokens(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x as [T, D], zeros for padding, and the mask as bool [T]; ValueError as in forward."""
        hidden = self.config.hidden_size
        if torch.jit.is_tracing():  # else it fails on an op's list of flags, which no trace holds
            raise NotImplementedError(
                "expected a call by Python, torch.compile or torch.export, got torch.jit.trace "
                "(also in TensorBoard's add_graph and torch.onnx.export(dynamo=False)), which "
                "cannot hold the layer's ops"
            )
        is_plain = isinstance(x, Tensor) and not (x.is_nested or is_dtensor(x))
        is_matrix = is_plain and x.dim() > 0 and x.shape[-1] == hidden
        if not (is_matrix and x.is_floating_point()):
            raise ValueError(
                f"expected floating-point x of shape [..., {hidden}], got {described(x)}"
            )
        # A view of the same shape would be a node of autograd, and one more for y.
        x_TD = x if x.dim() == 2 else x.reshape(-1, hidden)
        mask_T = None if mask is None else as_mask(mask, x.shape[:-1]).reshape(-1)
        if mask_T is not None:
            # Attention leaves NaN where a row of padding saw nothing, and 0 times NaN is no 0.
            x_TD = torch.where(mask_T[:, None], x_TD, 0)
        return x_TD, mask_T

    def _route(
        self, x_TD: Tensor, mask_T: Tensor | None, routing: Tensor | RouterOutput | None
    ) -> RouterOutput:
        if isinstance(routing, RouterOutput):
            routed = routing
        else:
            options = {} if mask_T is None else {"mask_T": mask_T}
            if routing is not None:
                options["expert_ids_TK"] = routing
            routed = self.router(x_TD, **options)
        if isinstance(routing, RouterOutput) or not _is_as_returned(self.router):
            _check_routed(routed, x_TD.shape[0])
        if mask_T is None:
            return routed
        real_T = mask_T if routed.token_ids_N is None else mask_T[routed.token_ids_N]
        ids_TK = torch.where(real_T[:, None], routed.expert_ids_TK, -1)
        balanced_TK = routed.balanced_ids_TK
        if balanced_TK is not None:
            balanced_TK = torch.where(real_T[:, None], balanced_TK, -1)
        return replaced(routed, expert_ids_TK=ids_TK, balanced_ids_TK=balanced_TK)

    def _add_unrouted(self, x_TD: Tensor, y_TD: Tensor, mask_T: Tensor | None) -> Tensor:
        """Add what every token gets, the output bias and the shared expert; padding stays 0."""
        config = self.config
        if self.bias is not None:
            bias = to_plain(self.bias, config.hidden_size)
            if config.shared_expert_weighted_sum:
                bias = at_least_fp32(bias) * (config.top_k / (config.top_k + 1))
            y_TD = y_TD + bias.to(y_TD.dtype)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD)
        if mask_T is not None and (self.shared_expert is not None or self.bias is not None):
            y_TD = torch.where(mask_T[:, None], y_TD, 0)
        return y_TD

    def _report(
        self,
        routed: RouterOutput,
        dispatched: Dispatched,
        shape: torch.Size,
        mask_T: Tensor | None,
        valid_tokens: Tensor | float | None,
        routing: Tensor | RouterOutput | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted auxiliary loss, 0 in eval mode, and the metrics."""
        router, score_function = self.router, None
        given = isinstance(routing, RouterOutput)
        ours = isinstance(router, Router) and is_ours(router, "scores") and _is_as_returned(router)
        if ours and not given:
            score_function = router.config.score_function  # the layer's may be another
        counts_E = balance_counts_E = dispatched.tokens_per_expert_E
        if routed.balanced_ids_TK is not None:
            balanced = mb_kernels.bin_tokens(routed.balanced_ids_TK, counts_E.shape[0])
            balance_counts_E = balanced.tokens_per_expert_E
        elif self.config.balance_by == "scores" and self.training and routed.probs_TE is not None:
            raise ValueError(
                "expected balanced_ids_TK in the RouterOutput with balance_by='scores', got None: "
                "give the best experts of each token there, or balance_by='visits'"
            )
        if self.reduce_counts is not None and self.config.balance_over != "sequence":
            balance_counts_E = reduced(balance_counts_E, self.reduce_counts)
        elif self.config.balance_over == "global_batch" and self.training:
            raise ValueError(
                "expected reduce_counts with balance_over='global_batch', got None: pass it to the "
                "constructor, or set layer.reduce_counts. Where one micro-batch is the global "
                "batch, balance_over='micro_batch' is the same loss"
            )
        metrics = router_losses(
            self.config,
            routed,
            dispatched,
            shape,
            balance_counts_E=balance_counts_E,
            reduce_counts=self.reduce_counts,
            mask_T=mask_T,
            num_tokens=valid_tokens,
            score_function=score_function,
            ids_are_experts=_is_as_returned(self.router) and routing is None,
        )._asdict()
        aux_loss = metrics.pop("aux_loss")
        if not self.training:
            aux_loss = torch.zeros_like(aux_loss.detach())
        # A copy: the backward pass reads the counts, and the caller may add up these over ranks in
        # place. Autograd does not notice what a collective changes.
        metrics["tokens_per_expert"] = counts_E.clone()
        return aux_loss, metrics


def _is_as_returned(router: nn.Module) -> bool:
    """Whether what came of this router is what `Router.forward` computes.

    Not behind a hook, which may put other probabilities in their place, say. Those of torch's own
    (FSDP2's) and of these packages hand on what they were given.
    """
    hooks = [*router._forward_hooks.values(), *_hooks_of_all_modules.values()]
    names = [getattr(hook, "__module__", "") for hook in hooks]
    return is_ours(router, "forward") and all(name.startswith(("torch.", "mb_")) for name in names)


def _flat_ids(expert_ids: Tensor, x: Tensor, top_k: int) -> Tensor:
    """Expert ids from elsewhere as [T, K]."""
    shape = (*x.shape[:-1], top_k)
    integers = isinstance(expert_ids, Tensor) and expert_ids.dtype in (torch.int32, torch.int64)
    if not integers or expert_ids.shape != shape:
        raise ValueError(
            f"expected routing of int32 or int64 {shape}, the experts of each token, or a "
            f"RouterOutput, got {described(expert_ids)}"
        )
    return expert_ids.reshape(-1, top_k)


def _check_routed(routed: RouterOutput, num_tokens: int) -> None:
    """Refuse what is no routing of these tokens."""
    if not isinstance(routed, RouterOutput):
        raise ValueError(f"expected a router that returns a RouterOutput, got {described(routed)}")
    for name in ("weights_TK", "expert_ids_TK", "balanced_ids_TK"):
        values = getattr(routed, name)
        if not (isinstance(values, Tensor) or (name == "balanced_ids_TK" and values is None)):
            raise ValueError(f"expected {name} to be a tensor, got {described(values)}")
    for name in ("probs_TE", "logits_TE"):
        values = getattr(routed, name)
        if values is None:
            continue
        is_matrix = isinstance(values, Tensor) and values.dim() == 2
        if not is_matrix or values.shape[0] != num_tokens:
            raise ValueError(
                f"expected a row of {name} for each of {num_tokens} tokens, got {described(values)}"
            )
    weights, ids, token_ids = routed.weights_TK, routed.expert_ids_TK, routed.token_ids_N
    if token_ids is not None:
        integers = isinstance(token_ids, Tensor) and token_ids.dtype in (torch.int32, torch.int64)
        if not integers or token_ids.dim() != 1:
            raise ValueError(
                f"expected int32 or int64 token_ids_N of one dimension, got {described(token_ids)}"
            )
    rows = num_tokens if token_ids is None else token_ids.numel()
    balanced = ids if routed.balanced_ids_TK is None else routed.balanced_ids_TK
    if balanced.shape != ids.shape:
        raise ValueError(
            f"expected balanced_ids_TK of the shape of expert_ids_TK, {tuple(ids.shape)}, got "
            f"{described(balanced)}"
        )
    is_matrix = ids.dim() == 2 and ids.shape[0] == rows and ids.shape[1] > 0
    if not is_matrix or weights.shape != ids.shape:
        what = "tokens" if token_ids is None else "entries of token_ids_N"
        raise ValueError(
            f"expected a row of expert_ids_TK and of weights_TK for each of {rows} {what}, of at "
            f"least one choice, got {described(ids)} and {described(weights)}"
        )


class dMoE(MoELayer):  # noqa: N801, the paper's name
    """Dropless MoE: every token reaches its K experts, whatever the load.

    Args:
        config: with `capacity_factor=None`.
        dispatcher: None computes in this process; a dispatcher of a parallel library spreads the
            experts over ranks, in eval mode too: set `layer.eval_dispatcher` for another there.
        router: any module that maps x_TD to a `RouterOutput`, called with `mask_T` and
            `expert_ids_TK` besides where the caller gives them; `mb_layers.routers` has some. None
            makes a `Router` of the config.
        reduce_counts: for `balance_over="global_batch"`: takes this micro-batch's tokens per expert
            [E] and returns those of the global batch, for instance by an all-reduce over the
            data-parallel ranks, plus the counts of the step's earlier micro-batches. Without it
            training with "global_batch" is an error. May be set later: `layer.reduce_counts`; then
            also for parts of sequences, with `balance_over="sequence"` and counts [B, E].
        device, dtype: of the parameters, as for `nn.Linear`.
    """

    def _check(self, config: MoEConfig) -> None:
        if config.capacity_factor is not None:
            raise ValueError(
                f"expected capacity_factor=None, got {config.capacity_factor}: dMoE drops no "
                "token; to cap the load of an expert use MoE"
            )


class MoE(MoELayer):
    """MoE with expert capacity: an expert drops its slots beyond ceil(capacity_factor K T / E).

    A dropped slot adds nothing to its token's output, and the token's other weights stay as they
    are; a token with all slots dropped gets zero, so use the layer under a residual connection.

    Args: as for `dMoE`, `config.capacity_factor` is required.
    """

    def _check(self, config: MoEConfig) -> None:
        if config.capacity_factor is None:
            raise ValueError(
                "expected a capacity_factor > 0, got None; 1.0 gives every expert its even share, "
                "and a layer that drops no token is dMoE"
            )


def _local(config: MoEConfig, capacity_factor: float | None) -> LocalDispatcher:
    return LocalDispatcher(
        config.num_experts,
        capacity_factor,
        min_capacity=config.min_capacity,
        drop_policy=config.drop_policy,
    )
