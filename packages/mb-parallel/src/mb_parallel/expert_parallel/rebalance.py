"""`rebalance_experts`: moves popular experts to different ranks, by giving experts new numbers.

All ranks wait for the one whose experts have the most tokens. Which expert has which number is
arbitrary. If the rows of the router, the experts' weights and the optimizer's state are put into
another order together, the layer computes the same function, and its state dict needs no
translation. So experts are numbered anew such that the loads of ranks are as even as possible: from
the most popular expert to the least, each goes to the rank with the lowest load that has room
(Graham, 1969: longest processing time first).

It helps more later in a run, when popular experts stay popular. With the loads of a dMoE 46M of 256
experts, four for a token, trained for 1,600 steps (mb-train's benchmarks/results, 2026-11-23), the
fullest of 8 ranks would have had 1.13 times an even share from step 832 on, and 1.03 times with new
numbers every 160 steps. In the first 320 steps these would have been 1.20 and 1.17.

Letters: E experts, P ranks, n the ranks' experts E / P.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from mb_layers import Router
from mb_layers.moe import MoELayer
from torch import Tensor, nn

from mb_parallel.arguments import at_least_0, at_least_1, one_module, several_optimizers
from mb_parallel.engines import is_dtensor
from mb_parallel.gradient_sync import free_gathered, refuse_apart
from mb_parallel.mesh import ParallelMesh, check_mesh, refused_alike
from mb_parallel.shards import local, spread
from mb_parallel.world import check_same

# Of a tensor that is gathered to be put in order: 1 GiB in fp32.
_TOGETHER = 2**28


@dataclass(frozen=True)
class Rebalanced:
    """A layer whose experts got new numbers.

    Attributes:
        layer: its name in the model.
        before, after: load of the fullest rank, in units of an even share.
        order: expert i is the one that was order[i].
    """

    layer: str
    before: float
    after: float
    order: tuple[int, ...]


@torch.no_grad()
def rebalance_experts(
    model: nn.Module,
    tokens_per_expert: Mapping[str, Tensor],
    mesh: ParallelMesh,
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    least_gain: float = 0.02,
) -> list[Rebalanced]:
    """Number the experts of each layer anew so that the ranks of its ep group have equal loads.

    Call it on every rank between two steps. What the model computes stays the same up to rounding.
    Counts by expert (`tokens_per_expert`) and recorded routing use the new numbers from then on.
    Whatever else you keep by expert, an average of the weights for instance, has the old ones:
    give it those of `Rebalanced.order`, or begin it anew. The ranks exchange whole tensors, piece
    by piece, so call it only every few hundred steps.

    Layers are left as they are if an expert's number has a meaning there or cannot change: with
    groups of experts (`num_expert_groups`), uniform assignment, routers other than
    `mb_layers.Router`, parameters that layers share, or experts that several ranks share. In a
    router of your own that derives from `mb_layers.Router`, an expert's number must only be the
    index of a row of its parameters and buffers.

    Args:
        model: after `parallelize_experts`, and `apply_data_parallel` if that is called.
        tokens_per_expert: by the name of a layer in `model`, this rank's tokens of each expert in a
            step, [E] or longer, as `MoEOutput.metrics` counts them; added up over the ranks here.
        mesh: the one that the experts are spread over.
        optimizer: one or several, all that train the layers: their state is put into the new order
            too. None: there is none to keep.
        least_gain: a layer is left as it is if the load of its fullest rank would fall by less than
            this fraction.

    Returns:
        The layers that changed, in the model's order; the same on all ranks.

    Raises:
        ValueError: a name of no layer with experts, too few counts, a parameter of the experts that
            has no axis of experts, something else for an optimizer, a `least_gain` below 0,
            gradients of micro-batches before the last of a step, or arguments that differ between
            the ranks.
    """
    one_module(model)
    check_mesh(mesh, model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    with refused_alike(mesh):
        optimizers = several_optimizers(optimizer)
        at_least_0(least_gain=least_gain)
        _check_counts(tokens_per_expert, layers)
        refuse_apart(model.parameters())  # FSDP2 would add rows of both orders up
    alike = {
        "tokens_per_expert of": sorted(tokens_per_expert),
        "optimizers": [type(one).__name__ for one in optimizers],
        "least_gain": least_gain,
    }
    for axis in map(mesh.axis, ("dp", "tp")):  # else a rank would wait for others
        with refused_alike(mesh):
            if axis is not None:
                check_same(alike, "what rebalance_experts is given", group=axis.get_group())
    ranks, done = mesh.ep_size, []
    owners = Counter(p for layer in layers.values() for p in layer.parameters())
    for name, layer in layers.items():
        shared = any(owners[parameter] > 1 for parameter in layer.parameters())
        if ranks == 1 or name not in tokens_per_expert or shared or not _renumbers(layer, ranks):
            continue
        experts = layer.config.num_experts
        counts_E = tokens_per_expert[name].flatten()[:experts].double()
        for axis in ("dp", "tp"):  # also where they are equal, so that all ranks agree
            counts_E = mesh.all_reduce(counts_E.clone(), axis)
        order_E = balanced_order(counts_E, ranks)
        before, after = (fullest_rank(c, ranks) for c in (counts_E, counts_E[order_E]))
        if before - after >= least_gain * before:
            free_gathered(model)  # else these weights would stay as they were
            _renumber(layer, order_E, optimizers)
            done.append(Rebalanced(name, before, after, tuple(order_E.tolist())))
    return done


def _check_counts(tokens_per_expert: Mapping[str, Tensor], layers: Mapping[str, MoELayer]) -> None:
    """Refuse counts of no layer, or of one whose experts cannot get new numbers."""
    for name, counts_E in tokens_per_expert.items():
        experts = layers[name].config.num_experts if name in layers else 0
        given = counts_E.numel() if isinstance(counts_E, Tensor) else -1
        if not experts or given < experts:
            known = {n: layer.config.num_experts for n, layer in layers.items()}
            got = type(counts_E).__name__ if given < 0 else f"{given} counts"
            raise ValueError(
                "Expected tokens_per_expert by the names of layers, a tensor of a count for each "
                f"expert, of {known}, got {name!r} with {got}."
            )
        for parameter in layers[name].experts.parameters():
            if parameter.shape[:1] != (experts,):
                raise ValueError(
                    f"Expected parameters of {experts} experts to be [{experts}, ...], got "
                    f"{tuple(parameter.shape)} in {name or 'the layer'}. Leave this layer out of "
                    "tokens_per_expert."
                )


def balanced_order(tokens_per_expert_E: Tensor, ranks: int) -> Tensor:
    """The experts, int64 [E], in an order that spreads their loads evenly over `ranks`.

    Args:
        tokens_per_expert_E: loads, not negative, [E].
        ranks: a divisor of E.

    Raises:
        ValueError: it is none.

    Returns:
        On the loads' device: the n = E / ranks experts of rank 0, those of rank 1, and so on; those
        of one rank by number.
    """
    _check_divides(ranks, tokens_per_expert_E.numel())
    loads = tokens_per_expert_E.tolist()
    room = len(loads) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda e: -loads[e]):
        free = (r for r in range(ranks) if len(held[r]) < room)
        rank = min(free, key=lambda r: totals[r])
        held[rank].append(expert)
        totals[rank] += loads[expert]
    order = [expert for mine in held for expert in sorted(mine)]
    return torch.tensor(order, dtype=torch.int64, device=tokens_per_expert_E.device)


def fullest_rank(tokens_per_expert_E: Tensor, ranks: int) -> float:
    """Load of the fullest of `ranks`, in units of an even share; 1 where there is no load.

    Raises:
        ValueError: `ranks` does not divide the experts.
    """
    _check_divides(ranks, tokens_per_expert_E.numel())
    of_ranks = tokens_per_expert_E.reshape(ranks, -1).sum(1)
    total = of_ranks.sum().item()
    return of_ranks.max().item() * ranks / total if total else 1.0


def _check_divides(ranks: int, experts: int) -> None:
    at_least_1(ranks=ranks)
    if experts % ranks:
        raise ValueError(f"Expected ranks to divide the {experts} experts, got {ranks}.")


def _renumbers(layer: MoELayer, ranks: int) -> bool:
    """Whether the layer's experts can get new numbers without changing what it computes."""
    config, router = layer.config, layer.router
    by_choice = isinstance(router, Router) and all(
        tensor.shape[:1] == (config.num_choices,)
        for tensor in (*router.parameters(), *router.buffers())
    )
    free = config.num_expert_groups is None and not config.uniform_assignment
    return by_choice and free and config.num_experts % ranks == 0


def _renumber(
    layer: MoELayer, order_E: Tensor, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Let expert i be the one that was order_E[i]."""
    router = layer.router
    for tensor in (*layer.experts.parameters(), *router.parameters(), *router.buffers()):
        _reorder(tensor, order_E)
        if tensor.grad is not None:
            _reorder(tensor.grad, order_E)
        states = (optimizer.state.get(tensor, {}) for optimizer in optimizers)
        for key, value in (entry for state in states for entry in state.items()):
            # Adafactor's moment of a matrix's columns has no axis of experts.
            columns = tensor.ndim == 2 and key == "exp_avg_sq_col"
            if isinstance(value, Tensor) and value.ndim and not columns:
                _reorder(value, order_E)
    for module in layer.experts.modules():
        for name, copy in getattr(module, "working_copies", {}).items():
            copy.detach().copy_(local(module.get_parameter(name)))


def _reorder(tensor: Tensor, order_E: Tensor) -> None:
    """Let row i of `tensor` [E or more, ...], plain or a DTensor, be its row order_E[i]."""
    order_E = order_E.to(tensor.device)
    rest = torch.arange(len(order_E), tensor.shape[0], device=order_E.device)
    order = torch.cat((order_E, rest))  # choices that are no experts stay behind them
    shard = local(tensor).detach()
    placements = tensor.placements if is_dtensor(tensor) else ()
    by_row = [getattr(placement, "dim", None) == 0 for placement in placements]
    if not is_dtensor(tensor) or not any(by_row):
        shard.copy_(shard[order])
        return
    from torch.distributed.tensor import Replicate

    pairs = zip(placements, by_row, strict=True)
    together = [Replicate() if rows else placement for placement, rows in pairs]
    chunks = tensor.__create_chunk_list__()  # as distributed checkpoints ask where a shard begins
    mine = order[chunks[0].offsets[0] :][: len(shard)] if chunks else order[:0]
    step = max(1, _TOGETHER // (len(order) * math.prod(shard.shape[2:])))
    for part in shard.split(step, dim=1) if shard.ndim > 1 else (shard,):
        shape = (len(order), *part.shape[1:])
        whole = spread(part.contiguous(), tensor.device_mesh, placements, shape)
        whole = whole.redistribute(placements=together)
        part.copy_(local(whole)[mine])
