"""Stands in for `megablocks.layers.moe`: layers with its names, and its lists of losses.

A layer here takes MegaBlocks' `Arguments`, has MegaBlocks' parameters (`router.layer.weight`,
`experts.mlp.w1`, ...) in MegaBlocks' layout, and returns what MegaBlocks returns. Underneath it is
a `mb_layers` layer, called with these parameters translated, at the price of one copy of the
experts' weights per pass; `mb_layers.dMoE` itself does without.

The lists belong to the process, as in MegaBlocks, and so do their rules: one entry per layer and
forward pass in training, to be cleared once per step. A pass that recomputes a checkpoint in the
backward adds none. torch.export refuses a layer in training: no program could add one.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from mb_kernels.exporting import is_exporting
from torch import Tensor, nn
from torch.func import functional_call

from mb_layers.compat.arguments import Arguments, Layer, layer_from_arguments, read_arguments
from mb_layers.compat.checkpoints import rules, to_megablocks
from mb_layers.losses import load_balancing_loss, z_loss
from mb_layers.model import Chain, in_backward
from mb_layers.router import RouterOutput
from mb_layers.state_dicts import translate
from mb_layers.tensors import at_least_fp32

_load_balancing, _router_logits = Chain(), Chain()
_one_call = threading.RLock()


def save_load_balancing_loss(loss: tuple[Tensor, Tensor]) -> None:
    """Collect (tokens_per_expert [E], scores [T, E]) of a pass of a layer of your own."""
    _load_balancing.add(loss)


def get_load_balancing_loss() -> list[tuple[Tensor, Tensor]]:
    """Return (tokens_per_expert [E], scores [T, E]) of each layer's pass since the last clear."""
    return _load_balancing.entries()


def clear_load_balancing_loss() -> None:
    """Forget what was collected; to be called once per step."""
    _load_balancing.clear()


def batched_load_balancing_loss(args: Arguments) -> Tensor | float:
    """Return moe_loss_weight times the sum of the collected losses over `num_layers`.

    With perfect balance in every layer that is `moe_loss_weight`, summed over pipeline stages.

    Raises:
        ValueError: not as many entries as this pipeline stage has layers.
    """
    args = read_arguments(args)
    if args.moe_loss_weight == 0:
        return 0.0
    expected = args.num_layers_per_virtual_pipeline_stage or (
        args.num_layers // args.pipeline_model_parallel_size
    )
    collected = get_load_balancing_loss()
    if len(collected) != expected:
        raise ValueError(
            f"expected the losses of {expected} layers, got {len(collected)}: num_layers counts "
            "the model's MoE layers, and clear_load_balancing_loss is due once per step"
        )
    losses = [load_balancing_loss(scores_TE, counts_E) for counts_E, scores_TE in collected]
    return args.moe_loss_weight * torch.stack(losses).sum() / args.num_layers


def clear_router_zloss() -> None:
    """Forget the collected logits; to be called once per step."""
    _router_logits.clear()


def batched_router_zloss(args: Arguments) -> Tensor | float:
    """Return moe_zloss_weight times each collected pass's z-loss, a vector."""
    args = read_arguments(args)
    if args.moe_zloss_weight == 0:
        return 0.0
    losses = [z_loss(logits_TE) for logits_TE in _router_logits.entries()]
    if not losses:
        raise ValueError("expected collected logits, got none: run a forward pass in training")
    return args.moe_zloss_weight * torch.stack(losses)


class _Part(nn.Module):
    """A part of a layer, which holds parameters and computes nothing.

    Hooks that come before its forward run in each pass of the layer: with one pruning sets a
    weight. The others are refused, because they wait for what never happens. With
    `fully_shard(layer.experts)`, say, gradients were the sum over the ranks, not their mean.
    """

    def forward(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise ValueError(
                "expected the whole layer to be called, got a call of a part, which holds "
                "parameters and computes nothing: call layer(x), or use mb_layers.dMoE"
            )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "expected a hook of the whole layer, got one of a part, which holds parameters and "
            "computes nothing: hook the layer, shard it as fully_shard(layer), or use "
            "mb_layers.dMoE, whose parts compute"
        )

    register_forward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook


class _LinearPart(_Part, nn.Linear):  # ty: ignore[incompatible-method-override]
    """A part that is an `nn.Linear` in MegaBlocks.

    It is one here too, for those who tell modules by their type: what initialises a model's
    weights, or sorts them into an optimizer's groups.
    """

    bias: nn.Parameter | None

    def __init__(self, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)  # the parameters are the layer's to make
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)


class _Layer(nn.Module):
    """MegaBlocks' names and returns around a `mb_layers` layer."""

    kind: Layer

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args = read_arguments(args)
        whole = layer_from_arguments(self.args, layer=self.kind)
        theirs = to_megablocks(whole.state_dict(), whole.config, layer=self.kind)
        self._names, self._their_names = tuple(whole.state_dict()), tuple(theirs)
        self._rules = rules(self._their_names, whole.config)
        for name, tensor in theirs.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    is_linear = part == path[-1] and last == "weight"
                    made = _LinearPart(*tensor.shape) if is_linear else _Part()
                    module.add_module(part, made)
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(tensor))
        self._part_names = tuple(n for n, part in self.named_modules() if isinstance(part, _Part))
        # Its weights come with each call: in a tuple it is no submodule.
        self._whole = (whole.to("meta"),)
        self._routed: list[RouterOutput] = []
        # Of the passes since a backward recomputed one; some may be without, a teacher's, say.
        self._entry_has_gradient = self._recomputed = False
        whole.router.register_forward_hook(self._keep)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rules"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        (whole,) = self._whole
        self._rules = rules(self._their_names, whole.config)

    def _keep(self, router: nn.Module, args: Any, routed: RouterOutput) -> None:
        self._routed.append(routed)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., D] to y; with `bias` and `return_bias` to (y, bias), to be added up."""
        (whole,) = self._whole
        for name in self._part_names:
            part = self.get_submodule(name)
            if not isinstance(part, _Part):
                raise ValueError(
                    f"expected {name} as the layer made it, got {type(part).__name__}: parts "
                    "compute nothing, so DDP, FSDP and other wrappers go around the whole layer"
                )
            part()  # its hooks
        # As attributes: under a parametrization or FSDP1 they are no parameters of these names.
        theirs = {name: attrgetter(name)(self) for name in self._their_names}
        weights = translate(theirs, self._rules, self._names)
        bias = None
        if self.args.bias and self.args.return_bias:
            # A view: reentrant checkpointing makes what it returns depend on its inputs, and a
            # parameter that does would be computed anew in its own backward pass, for ever.
            bias = weights["bias"].view_as(weights["bias"])
            weights["bias"] = torch.zeros_like(bias)
            if whole.config.shared_expert_weighted_sum:  # as it is weighted where it is added
                bias = bias * (whole.config.top_k / (whole.config.top_k + 1))
        # Another thread's call would put the weights back while this one computes, or lose its
        # entry.
        with nullcontext() if torch.compiler.is_compiling() else _one_call:
            whole.train(self.training)
            whole.router.train(self.get_submodule("router").training)  # jitters by its own mode
            try:
                y, _, metrics = functional_call(whole, weights, (x,))
                (routed,) = self._routed
            finally:  # one of a pass that failed would hold its graph, and could not be copied
                self._routed.clear()
            if self.training:
                self._collect(routed, metrics["tokens_per_expert"])
        return y if bias is None else (y, bias)

    def _collect(self, routed: RouterOutput, counts_E: Tensor) -> None:
        has_loss = self.args.moe_loss_weight > 0 or self.args.moe_zloss_weight > 0
        learns = has_loss and routed.logits_TE is not None and routed.logits_TE.requires_grad
        if is_exporting():  # a saved program holds no list
            if learns:
                raise ValueError(
                    "expected a layer in eval mode within torch.export, whose program would train "
                    "without the router's losses, got one in training: call layer.eval(), or set "
                    "moe_loss_weight and moe_zloss_weight to 0"
                )
            return
        if in_backward():  # a recomputation, whose entry was made the first time
            if learns and not self._entry_has_gradient:
                raise ValueError(
                    "expected the router's losses to have gradients, got a layer checkpointed with "
                    "use_reentrant=True, whose first pass has none: pass use_reentrant=False, or "
                    "set moe_loss_weight and moe_zloss_weight to 0"
                )
            self._recomputed = True
            return
        if not torch.compiler.is_compiling():  # which cannot tell what is a recomputation
            earlier = self._entry_has_gradient and not self._recomputed
            self._entry_has_gradient, self._recomputed = torch.is_grad_enabled() or earlier, False
        assert routed.probs_TE is not None
        assert routed.logits_TE is not None
        if self.args.moe_loss_weight > 0:
            save_load_balancing_loss((counts_E, routed.probs_TE))
        if self.args.moe_zloss_weight > 0:
            _router_logits.add(at_least_fp32(routed.logits_TE))


class dMoE(_Layer):  # noqa: N801, their name
    """`megablocks.layers.dmoe.dMoE(args)`."""

    kind = "dMoE"


class MoE(_Layer):
    """`megablocks.layers.moe.MoE(args)`, with moe_capacity_factor."""

    kind = "MoE"
