"""What would be lost, without a word, where parts of a model are replaced; ValueError for that.

`swap_blocks` and `restore_blocks` ask before they change anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def refuse_replacing(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Raise for what holds on to these parts of the model, by their names, or to their weights."""
    if model in parts.values():
        raise ValueError(
            f"expected a model that holds blocks, got {type(model).__name__} alone, whose place "
            "nothing could take; moe_from_block makes a dMoE of a block"
        )
    _refuse_ddp(model)
    _refuse_hooks(parts)
    _refuse_shared(model, parts)


def refuse_subclasses(parts: Mapping[str, nn.Module]) -> None:
    """Raise for weights that are no plain tensors: those of a layer have another layout."""
    weights = (p.data for part in parts.values() for p in part.parameters())
    if kinds := sorted({type(weight).__name__ for weight in weights if type(weight) is not Tensor}):
        raise ValueError(
            f"expected blocks with plain weights, got some as {', '.join(kinds)}; swap_blocks "
            "before parallelize_experts, fully_shard and freeze_in_bits"
        )


def _refuse_ddp(model: nn.Module) -> None:
    """Raise for DistributedDataParallel, which averages the gradients of weights it was given."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "expected a model without DistributedDataParallel around it, got one within, whose new "
            "weights would never be averaged over the ranks; swap or restore the blocks of its "
            "`.module`, and wrap that anew"
        )


def _refuse_hooks(parts: Mapping[str, nn.Module]) -> None:
    """Raise for forward and backward hooks, which nobody would call any more."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    for name, part in parts.items():
        if any(getattr(part, kind) for kind in kinds):
            raise ValueError(
                f"expected blocks without hooks, got some on {name}, which would no longer be "
                "called; remove them, and register them on what takes its place"
            )


def _refuse_shared(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Raise for a weight of a part that is also elsewhere: both would get one of their own."""
    owners: dict[Tensor, nn.Module] = {}
    shared = []
    for part in dict.fromkeys(parts.values()):
        shared += [p for p in part.parameters() if owners.setdefault(p, part) is not part]
    inside = {module for part in parts.values() for module in part.modules()}
    for module in model.modules():
        if module not in inside:
            shared += [p for p in module.parameters(recurse=False) if p in owners]
    if shared:
        everywhere = model.named_parameters(remove_duplicate=False)
        names = [name for name, p in everywhere if p is shared[0]]
        raise ValueError(
            f"expected each weight in one block alone, got {' and '.join(names)}, which are one, "
            "and would be several that train apart; untie them, or let mb_layers.transformers."
            "use(model) run the experts"
        )
