"""A Mixture-of-Experts layer between tensor-parallel ones: the ranks share out its tokens.

Experts are no matter of tensor parallelism: `parallelize_experts` spreads them over ep ranks, of
which tp ranks are some. What is left is that the tp ranks, which hold the same tokens (or, with
sequence parallelism, different ones already), must not all send them.

Letters: B sequences, S tokens of a sequence, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mb_layers import MoE, MoEOutput, dMoE
from mb_layers.dispatch import LocalDispatcher
from mb_layers.experts import Experts
from torch import Tensor, nn

from mb_parallel.tensor_parallel import collectives
from mb_parallel.tensor_parallel.adapt import adapt, summed
from mb_parallel.tensor_parallel.styles import SEQUENCE, Region, Style


@dataclass(frozen=True)
class TokenParallel(Style):
    """`mb_layers.dMoE` or `MoE`: each tp rank routes its own run of the sequence.

    Router, shared expert and bias are replicated and their gradients added up. The gradients of the
    experts are each rank's own part; `apply_data_parallel` adds them up with those of the other
    ranks that hold the same experts. Load is counted over the tp ranks, so the auxiliary loss and
    the metrics are those of one process.

    A layer with capacity and its own local dispatcher routes all tokens on every rank, for which of
    them are dropped depends on all; each rank then keeps its run of the result. That costs tp times
    the work: spread such experts over ep ranks.
    """

    def apply(self, module: nn.Module, region: Region) -> None:
        if not isinstance(module, (MoE, dMoE)):
            raise ValueError(
                f"Expected mb_layers.MoE or dMoE, got {type(module).__name__}, whose router and "
                "losses are not known here."
            )
        if module.config.balance_over == "sequence":
            raise ValueError(
                "Expected balance_over 'micro_batch' or 'global_batch' with tp = "
                f"{region.size}, got 'sequence': the ranks hold runs of a sequence, whose loads do "
                "not add up to the sequence's loss."
            )
        for child in self.covers(module):
            names = [name for name, p in child._parameters.items() if p is not None]
            if names and not isinstance(child, Experts):
                adapt(child, views=dict.fromkeys(names, summed(region.group)))
        layer = module

        def forward(
            original: Callable[..., MoEOutput],
            x: Tensor,
            *,
            mask: Tensor | None = None,
            valid_tokens: Tensor | int | None = None,
        ) -> MoEOutput:
            options = {}
            if mask is not None and valid_tokens is None:
                valid_tokens = mask.count_nonzero()
            if routes_everything(layer):
                if mask is not None:
                    options = {"mask": mask, "valid_tokens": valid_tokens}
                output = original(region.enter(x), **options)
                y = collectives.own_slice(output.y, region.group, SEQUENCE)
                metrics = output.metrics
            else:
                if not region.sequence_parallel:
                    x = collectives.split(x, region.group, SEQUENCE)
                if mask is not None:
                    options["mask"] = collectives.own_slice(mask, region.group, -1)
                if valid_tokens is not None:
                    options["valid_tokens"] = valid_tokens / region.size
                output = original(x, **options)
                y, metrics = output.y, _over_ranks(output.metrics, region)
            if not region.sequence_parallel:
                y = collectives.join(y, region.group, SEQUENCE)
            # Each rank's is the mean over its tokens: their mean is the mean over all.
            aux_loss = collectives.reduce(output.aux_loss / region.size, region.group)
            return output._replace(y=y, aux_loss=aux_loss, metrics=metrics)

        def routes_everything(layer: Any) -> bool:
            dispatcher = layer.dispatcher
            return (
                isinstance(dispatcher, LocalDispatcher) and dispatcher.capacity_factor is not None
            )

        def counts_over_ranks(layer: Any) -> Callable[[Tensor], Tensor] | None:
            """What the layer calls: its own `reduce_counts`, given the counts of all tp ranks."""
            own = layer.__dict__.get("reduce_counts")
            if routes_everything(layer):
                return own

            def reduced(counts_E: Tensor) -> Tensor:
                counts_E = counts_E.clone()
                dist.all_reduce(counts_E, group=region.group)
                return counts_E if own is None else own(counts_E)

            return reduced

        def set_counts(layer: Any, own: Callable[[Tensor], Tensor] | None) -> None:
            layer.__dict__["reduce_counts"] = own

        adapt(
            module,
            forward=forward,
            attributes={"reduce_counts": property(counts_over_ranks, set_counts)},
        )

    def covers(self, module: nn.Module) -> list[nn.Module]:
        return list(module.modules())


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
