"""A Mixture-of-Experts layer between tensor-parallel ones.

Tensor parallelism does not split experts. `parallelize_experts` spreads them over the ep ranks, tp
ranks among them. It also splits the tokens that tp ranks hold in common, counts the load over these
ranks and averages the auxiliary loss. What is left for here is sequence parallelism, where each tp
rank has tokens of its own: the layer's other parameters, the padding mask and the metrics.

Letters: B sequences, S tokens of a sequence, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mb_layers import ExpertChoiceRouter, MoEOutput, RouterOutput, SinkhornRouter
from mb_layers.dispatch import replaced
from mb_layers.experts import Experts
from mb_layers.moe import MoELayer
from mb_layers.router import is_ours
from torch import Tensor, nn

from mb_parallel.random import make_distinct
from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import adapt, summed
from mb_parallel.tensor_parallel.styles import Region, Style

_SEQUENCE_PARALLEL = "_mb_sequence_parallel"
# Of a `Router`: all that come before its choice is made. One with such a step of its own may draw
# there, as `NoisyTopKRouter` does; these two do not.
_STEPS_THAT_DRAW = ("forward", "jitter", "logits", "choice")
_DRAW_NOTHING = (ExpertChoiceRouter, SinkhornRouter)


@dataclass(frozen=True)
class ExpertLayer(Style):
    """`mb_layers.dMoE` or `MoE` in the stream; `parallelize_experts` is to follow, with ep = 1 too.

    Without sequence parallelism every tp rank routes all tokens in the same way. With it each rank
    routes its part of the sequence. Then the gradients of router, shared expert and bias are added
    up, and metrics are those of all tokens. A mask [B, S] and expert ids [B, S, K] are given for
    the whole sequence and cut to the rank's part; a `RouterOutput` is given for that part only.

    In both cases a rank's gradients of the experts are a part of the sum. `apply_data_parallel`
    adds them up over the ranks that hold the same experts.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if not isinstance(module, MoELayer):
            raise ValueError(
                f"Expected mb_layers.MoE or dMoE, got {type(module).__name__}, whose router and "
                "losses are not known here."
            )
        check_sequence_parallel(module, region.sequence_parallel)
        keep_sequence_parallel(module, region.sequence_parallel)
        if not region.sequence_parallel:
            return

        def forward(
            _: nn.Module,
            original: Callable[..., MoEOutput],
            x: Tensor,
            *,
            mask: Tensor | None = None,
            valid_tokens: Tensor | float | None = None,
            routing: Tensor | RouterOutput | None = None,
        ) -> MoEOutput:
            if isinstance(routing, Tensor):
                routing = collectives.own_slice(routing, region.group, -2)
            if mask is not None:
                valid_tokens = mask.count_nonzero() if valid_tokens is None else valid_tokens
                mask = collectives.own_slice(mask, region.group, -1)
            if valid_tokens is not None:  # the ranks' losses are averaged
                valid_tokens = valid_tokens / region.size
            output = original(x, mask=mask, valid_tokens=valid_tokens, routing=routing)
            return replaced(output, metrics=_over_ranks(output.metrics, region))

        router = module.router
        steady = type(router) in _DRAW_NOTHING or is_ours(router, *_STEPS_THAT_DRAW)
        draws = module.config.jitter_eps or not steady
        for child in self.covers(module):  # which changes their types
            names = [name for name, p in child._parameters.items() if p is not None]
            if names and not isinstance(child, Experts):
                views = dict.fromkeys(names, summed(region.group))
                adapt(child, region.adapted, self, views=views)
        adapt(module, region.adapted, self, forward=forward)
        if draws:  # else not: neither the compiler nor a CUDA graph takes streams that change
            make_distinct([router], region.rank)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return list(module.modules())


def kept_sequence_parallel(layer: nn.Module) -> bool | None:
    """What `keep_sequence_parallel` noted for the layer; None if it did not."""
    return getattr(layer, _SEQUENCE_PARALLEL, None)


def check_sequence_parallel(layer: nn.Module, given: bool) -> None:
    """Raise ValueError if `keep_sequence_parallel` noted another value for the layer."""
    other = kept_sequence_parallel(layer)
    if other not in (None, given):
        raise ValueError(
            f"Expected sequence_parallel={other} in parallelize_tensors and parallelize_experts "
            f"alike, got {given}: experts would see tokens twice, or parts as wholes."
        )


def keep_sequence_parallel(layer: nn.Module, given: bool) -> None:
    """Note what `parallelize_tensors` or `parallelize_experts` was given for the layer."""
    setattr(layer, _SEQUENCE_PARALLEL, given)


def _over_ranks(metrics: dict[str, Tensor], region: Region) -> dict[str, Tensor]:
    """The metrics of all ranks' tokens in one exchange: counts are added up, means averaged."""
    counts_E = metrics["tokens_per_expert"]
    others = metrics.keys() - {"tokens_per_expert", "load_imbalance"}
    parts = {name: metrics[name].double() / region.size for name in sorted(others)}
    # A share of the slots, of which ranks may have unequal numbers.
    parts["dropped_fraction"] = metrics["dropped_fraction"].double() * counts_E.sum()
    packed = torch.cat([counts_E.double(), torch.stack(list(parts.values()))])
    dist.all_reduce(packed, group=region.group)
    totals_E, values = packed.split([counts_E.numel(), len(parts)])
    combined = dict(zip(parts, values.unbind(), strict=True))
    slots = totals_E.sum().clamp(min=1)
    combined["dropped_fraction"] = combined["dropped_fraction"] / slots
    combined["load_imbalance"] = totals_E.max() * totals_E.numel() / slots
    combined["tokens_per_expert"] = totals_E
    return {name: combined[name].to(metrics[name].dtype) for name in metrics}
