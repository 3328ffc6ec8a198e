"""For models of several MoE layers: their losses and metrics together, and layers used as MLPs.

    with collect(model) as moe:
        logits = model(tokens)
    loss = cross_entropy(logits, targets) + moe.aux_loss()

Nothing stays on the model: hooks live as long as the `with`. A recomputation in the backward pass
is not collected again.

Letters: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle

from mb_layers import arguments
from mb_layers.losses import attach_aux_loss, reduced
from mb_layers.moe import MoELayer, MoEOutput
from mb_layers.router import balancing_bias_of, update_balancing_bias

_NONE_RAN = (
    "expected MoE layers to run inside collect(model), none did; a model that was compiled before "
    "has no hooks"
)


class Collected:
    """Auxiliary losses and metrics of the passes through a model's MoE layers, by layer name."""

    def __init__(self, layers: dict[str, MoELayer]) -> None:
        self.layers = layers
        self.passes: list[tuple[str, Tensor, dict[str, Tensor]]] = []
        self.ran_with_gradients: set[str] = set()

    def aux_loss(self) -> Tensor:
        """Return the mean auxiliary loss over the layers' passes, a scalar with gradient.

        Of layers on several devices it is on the last one's.

        Raises:
            ValueError: no layer ran, or reentrant checkpointing ran one without gradients.
        """
        losses = [aux_loss for _, aux_loss, _ in self.passes]
        if not losses:
            raise ValueError(f"{_NONE_RAN}: let it return its aux_loss")
        lost = {name for name, _, _ in self.passes} - self.ran_with_gradients
        lost = sorted(name for name in lost if _router_learns(self.layers[name]))
        if lost and torch.is_grad_enabled():
            raise ValueError(
                f"expected auxiliary losses with gradients, got none from {', '.join(lost)}: run "
                "the layers with gradients enabled, and checkpoint them with use_reentrant=False; "
                "where a router is not to learn, freeze it by requires_grad_(False)"
            )
        return mean_loss(losses, losses[-1].device)

    def metrics(self) -> dict[str, Tensor]:
        """Return each metric of all passes, stacked in their order: [L] or [L, E].

        Counts of layers with fewer experts than others end in zeros. Of layers on several devices
        all are on the last one's.
        """
        if not self.passes:
            return {}
        by_pass = [metrics for _, _, metrics in self.passes]
        return {key: _rows([m[key] for m in by_pass]) for key in by_pass[0]}

    def tokens_per_expert(self) -> dict[str, Tensor]:
        """Return each layer's counts [E], summed over its passes."""
        counts: dict[str, Tensor] = {}
        for name, _, metrics in self.passes:
            counts[name] = counts.get(name, 0) + metrics["tokens_per_expert"]
        return counts


class Chain:
    """Entries one behind the other.

    No list, because a compiled layer that appends to one is compiled anew for each of its lengths.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._last: tuple[Any, Any] = (None, None)  # an entry, and the like of those before it

    def add(self, entry: Any) -> None:
        self._last = (entry, self._last)

    def entries(self) -> list[Any]:
        """The entries, the first one first."""
        found = []
        entry, before = self._last
        while before is not None:
            found.append(entry)
            entry, before = before
        return found[::-1]


def mean_loss(losses: list[Tensor], device: torch.device) -> Tensor:
    """The mean of scalars from layers that may be on several devices, on this one."""
    return torch.stack([loss.to(device) for loss in losses]).mean()


def _rows(values: list[Tensor]) -> Tensor:
    """Numbers to [L], or counts [E] to [L, E], E the most of any layer, zeros behind the others.

    On the device of the last.
    """
    values = [value.to(values[-1].device) for value in values]
    return pad_sequence(values, batch_first=True) if values[0].dim() else torch.stack(values)


def weighs_losses(layer: MoELayer) -> bool:
    """Whether the layer's auxiliary loss can be other than 0."""
    return layer.config.load_balancing_loss_weight > 0 or layer.config.z_loss_weight > 0


def _router_learns(layer: MoELayer) -> bool:
    learns = any(p.requires_grad for p in layer.router.parameters())
    return layer.training and weighs_losses(layer) and learns


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the `dMoE` and `MoE` layers of a model by name; it is an error to have none."""
    arguments.a_module(model=model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    if not layers:
        raise ValueError("expected a model with dMoE or MoE layers, found none")
    return layers


def in_backward() -> bool:
    """Whether a backward pass is under way: a forward is then a checkpoint's recomputation."""
    if torch.compiler.is_compiling():  # tracing is always a forward pass, and could not ask
        return False
    return torch._C._current_graph_task_id() != -1


def after_forward(module: nn.Module, take: Callable[[Any], None]) -> RemovableHandle:
    """Call `take(output)` behind each forward of this module.

    Not of a copy of it, although torch copies hooks with a module.
    """

    def hook(called: nn.Module, args: Any, output: Any) -> None:
        if called is module:
            take(output)

    return module.register_forward_hook(hook)


@contextmanager
def collect(model: nn.Module) -> Generator[Collected]:
    """Collect what every `dMoE` and `MoE` in `model` returns while the context is open.

    A pass of the model that raises an error counts as if it had not been. Not for compiled models:
    their hooks are fixed when they are compiled. Passes of all threads are collected, so a model
    that several train at the same time needs a copy for each.
    """
    layers = moe_layers(model)
    collected = Collected(layers)

    def keep(name: str, output: MoEOutput) -> None:
        if not in_backward():
            collected.passes.append((name, output.aux_loss, output.metrics))
            if torch.is_grad_enabled():
                collected.ran_with_gradients.add(name)

    before: list[int | None] = []  # a pass under way began behind so many; None once it is whole

    def begin(model: nn.Module, args: Any) -> None:
        before.append(None if in_backward() else len(collected.passes))

    def end(model: nn.Module, args: Any, output: Any) -> None:
        if before:  # else the context was opened within the pass
            before[-1] = None

    def undo(model: nn.Module, args: Any, output: Any) -> None:
        if before and (start := before.pop()) is not None:
            del collected.passes[start:]

    hooks = [after_forward(layer, partial(keep, name)) for name, layer in layers.items()]
    hooks.append(model.register_forward_pre_hook(begin))
    hooks.append(model.register_forward_hook(end))
    hooks.append(model.register_forward_hook(undo, always_call=True))
    try:
        yield collected
    finally:
        for hook in hooks:
            hook.remove()


def update_balancing_biases(
    passes: Iterable[Collected],
    *,
    rate: float,
    reduce_counts: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Move every router's balancing bias by one step; once per optimizer step.

    That of a router which several layers share moves by the counts of all of them.

    Args:
        passes: what was collected from each of the step's micro-batches.
        rate: the step of `update_balancing_bias`.
        reduce_counts: sums counts [L, E] over the ranks that hold copies of these routers, for
            instance by an all-reduce; one call for all layers, E the most experts of any.

    Raises:
        ValueError: no list of passes, no pass, no layer with a balancing bias, or none that ran;
            `reduce_counts` returns something else than counts.
    """
    if isinstance(passes, Collected):
        raise ValueError(
            "expected a list of what was collected from each micro-batch, got what was collected "
            "from one; for a step of one micro-batch pass [moe]"
        )
    passes = list(passes)
    for collected in passes:
        if not isinstance(collected, Collected):
            raise ValueError(
                "expected what collect(model) yields for each micro-batch, got "
                f"{arguments.described(collected)} among passes"
            )
    routers: dict[Tensor, nn.Module] = {}  # by their biases: layers may share one
    names: dict[Tensor, list[str]] = {}
    for name, layer in (passes[0].layers if passes else {}).items():
        bias_E = balancing_bias_of(layer.router)
        if bias_E is not None:
            routers[bias_E] = layer.router
            names.setdefault(bias_E, []).append(name)
    if not routers:
        raise ValueError(
            "expected collected passes of layers with MoEConfig(balancing_bias=True), got none"
        )
    if not any(collected.passes for collected in passes):
        raise ValueError(
            f"{_NONE_RAN}: let it return its counts, and call update_balancing_bias for each router"
        )
    by_pass = [collected.tokens_per_expert() for collected in passes]

    def summed(bias_E: Tensor) -> Tensor:
        counts_E = torch.zeros_like(bias_E, dtype=torch.int64)
        for counts in by_pass:
            for name in names[bias_E]:
                if name in counts:  # a layer may be left out of a pass
                    counts_E = counts_E + counts[name]
        return counts_E

    counts = [summed(bias_E) for bias_E in routers]
    counts_LE = _rows(counts)
    if reduce_counts is not None:
        counts_LE = reduced(counts_LE, reduce_counts)
    for router, mine_E, counts_E in zip(routers.values(), counts, counts_LE, strict=True):
        update_balancing_bias(router, counts_E[: len(mine_E)], rate=rate)


class AsMLP(nn.Module):
    """A layer that returns y alone, for `nn.Sequential` or in the place of a dense MLP.

    Args:
        layer: a `dMoE` or `MoE`.
        aux_scale: in training the gradients are those of loss + aux_scale * aux_loss
            (`attach_aux_loss`), and y may not be changed in place: `x = x + mlp(x)`. None: the
            auxiliary loss is left to `collect`.
    """

    def __init__(self, layer: MoELayer, *, aux_scale: float | Tensor | None) -> None:
        super().__init__()
        arguments.a_module(layer=layer)
        moe_layers(layer)  # of another module's output parts would be taken for y and a loss
        self.layer = layer
        self.aux_scale = aux_scale

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to y of the same shape."""
        y, aux_loss, _ = self.layer(x)
        if self.aux_scale is None or not (self.training and torch.is_grad_enabled()):
            return y
        return attach_aux_loss(y, aux_loss, self.aux_scale)

    def extra_repr(self) -> str:
        return f"aux_scale={self.aux_scale}"
