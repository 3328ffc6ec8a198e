"""A Mixture-of-Experts layer between tensor-parallel ones.

Experts are no matter of tensor parallelism: `parallelize_experts` spreads them over ep ranks, of
which tp ranks are some, and sees to it that tp ranks share out tokens that they hold alike, that
load is counted over them and the auxiliary loss is their mean. What is left are the layer's other
parameters, the padding mask and the metrics where each tp rank has tokens of its own.

Letters: B sequences, S tokens of a sequence, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mb_layers import MoE, MoEOutput, RouterOutput, dMoE
from mb_layers.dispatch import replaced
from mb_layers.experts import Experts
from torch import Tensor, nn

from mb_parallel.random import make_distinct
from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import adapt, summed
from mb_parallel.tensor_parallel.styles import Region, Style

_SEQUENCE_PARALLEL = "_mb_sequence_parallel"


@dataclass(frozen=True)
class ExpertLayer(Style):
    """`mb_layers.dMoE` or `MoE` in the stream; `parallelize_experts` is to follow, with ep = 1 too.

    Without sequence parallelism every tp rank routes all tokens alike. With it each rank routes its
    own run of the sequence: the gradients of router, shared expert and bias are added up, a mask
    [B, S] and expert ids [B, S, K] from outside are cut to the rank's run (a `RouterOutput` is of
    that run alone), and metrics are those of all tokens.

    The gradients of the experts are each rank's own part in either case; `apply_data_parallel` adds
    them up with those of the other ranks that hold the same experts.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if not isinstance(module, (MoE, dMoE)):
            raise ValueError(
                f"Expected mb_layers.MoE or dMoE, got {type(module).__name__}, whose router and "
                "losses are not known here."
            )
        setattr(module, _SEQUENCE_PARALLEL, region.sequence_parallel)
        if not region.sequence_parallel:
            return

        def forward(
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

        for child in self.covers(module):
            names = [name for name, p in child._parameters.items() if p is not None]
            if names and not isinstance(child, Experts):
                views = dict.fromkeys(names, summed(region.group))
                adapt(child, region.adapted, self, views=views)
        adapt(module, region.adapted, self, forward=forward)
        if module.config.jitter_eps:
            make_distinct([module.router], region.rank)

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return list(module.modules())


def sequence_parallel_of(layer: nn.Module) -> bool | None:
    """What `parallelize_tensors` was told, None where it did not come by."""
    return getattr(layer, _SEQUENCE_PARALLEL, None)


def _over_ranks(metrics: dict[str, Tensor], region: Region) -> dict[str, Tensor]:
    """The metrics of all ranks' tokens: counts added up, means averaged, in one exchange."""
    counts_E = metrics["tokens_per_expert"]
    slots = counts_E.sum().double()
    means = [name for name in metrics if name not in ("tokens_per_expert", "load_imbalance")]
    parts = [metrics[name].double() / region.size for name in means]
    if "dropped_fraction" in means:  # a share of the slots, of which ranks may have unequal numbers
        parts[means.index("dropped_fraction")] = metrics["dropped_fraction"].double() * slots
    packed = torch.cat([counts_E.double(), torch.stack(parts)])
    dist.all_reduce(packed, group=region.group)
    totals_E, values = packed.split([counts_E.numel(), len(means)])
    combined = dict(zip(means, values.unbind(), strict=True))
    slots = totals_E.sum().clamp(min=1)
    if "dropped_fraction" in means:
        combined["dropped_fraction"] = combined["dropped_fraction"] / slots
    combined["load_imbalance"] = totals_E.max() * totals_E.numel() / slots
    combined["tokens_per_expert"] = totals_E
    return {name: combined[name].to(metrics[name].dtype) for name in metrics}
