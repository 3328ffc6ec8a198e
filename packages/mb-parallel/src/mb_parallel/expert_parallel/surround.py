"""What a layer needs around its dispatcher if several ranks share its experts or its tokens.

Capacity, load and auxiliary loss are then those of all these ranks. Tokens that all tensor-parallel
ranks hold are shared out among them.

Letters: B sequences, S tokens of a sequence, T tokens, D hidden, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mb_layers.dispatch import Dispatched, LocalDispatcher, TokenDispatcher, replaced
from mb_layers.moe import MoELayer, MoEOutput
from torch import Tensor, nn

from mb_parallel.expert_parallel.collectives import (
    Place,
    gathered,
    join_rows,
    mean_over,
    split_rows,
)
from mb_parallel.expert_parallel.counts import StepCounts
from mb_parallel.expert_parallel.fixed import FixedDispatcher
from mb_parallel.expert_parallel.global_capacity import GlobalCapacity
from mb_parallel.forwards import wrap_forward
from mb_parallel.mesh import ParallelMesh
from mb_parallel.tensor_parallel.experts import keep_sequence_parallel

_SURROUNDED = "_mb_surrounded"  # on a layer that several ranks share


def surround(
    layer: MoELayer, mesh: ParallelMesh, name: str, sequence_parallel: bool, equal_tokens: bool
) -> None:
    """Change the layer's dispatchers, losses and counts as said above, in place."""
    config, tp = layer.config, mesh.axis("tp")
    if tp is not None:
        keep_sequence_parallel(layer, sequence_parallel)
    moves: TokenDispatcher = layer.dispatcher
    split_over = mesh.dims.cp_tp if sequence_parallel else mesh.cp_size
    shared = mesh.ep_size > 1 or mesh.dims.cp_tp > 1
    if isinstance(moves, LocalDispatcher) and shared:
        moves = LocalDispatcher(config.num_experts)  # the capacity is that of all ranks

    def around(inner: TokenDispatcher, capacity_factor: float | None) -> TokenDispatcher:
        if capacity_factor is not None and not isinstance(inner, FixedDispatcher):
            inner = GlobalCapacity(
                inner,
                config.num_experts,
                capacity_factor,
                Place(_capacity_group(mesh), name),
                min_capacity=config.min_capacity,
                drop_policy=config.drop_policy,
                equal_tokens=equal_tokens,
                split_over=split_over,
            )
        if tp is not None and not sequence_parallel:
            inner = SharedTokens(inner, Place(tp.get_group(), name))
        return inner

    if shared:
        setattr(layer, _SURROUNDED, True)
        layer.dispatcher = around(moves, config.capacity_factor)
        if layer.eval_dispatcher is not None:
            fixed = isinstance(layer.eval_dispatcher, FixedDispatcher)
            moves = layer.eval_dispatcher if fixed else moves
            layer.eval_dispatcher = around(moves, config.eval_capacity_factor)
    if split_over > 1:
        wrap_forward(layer, _count_sequences)
    if mesh.cp_size > 1:
        layer.register_forward_pre_hook(_count_valid(mesh), with_kwargs=True)
    # The loss of a micro-batch is the mean of its parts', each with the load of all. Over tp ranks
    # it is taken here, over data-parallel ones by whoever adds up their losses.
    axes = []
    if config.balance_over == "global_batch":
        axes = ["dp", "tp"] if sequence_parallel else ["dp"]
    elif split_over > 1:
        axes = ["cp_tp" if sequence_parallel else "cp"]
    if tp is not None and sequence_parallel:
        layer.register_forward_hook(_mean_losses(Place(tp.get_group(), name)))
    if axes and layer.reduce_counts is None:
        layer.reduce_counts = _sum_counts(mesh, axes)
        if config.balance_over == "global_batch":
            layer.reduce_counts = StepCounts(layer.reduce_counts)


def is_surrounded(layer: MoELayer) -> bool:
    """Whether the layer is one of several ranks', by `surround` or a dispatcher of the user's."""
    return hasattr(layer, _SURROUNDED) or not isinstance(layer.dispatcher, LocalDispatcher)


def _capacity_group(mesh: ParallelMesh) -> dist.ProcessGroup:
    """The ranks whose tokens share the experts' capacity: those of an ep and of a cp x tp group."""
    ep, same = mesh.ep_size, mesh.dims.cp_tp
    if ep % same and same % ep:
        product, sizes = "tp", f"tp = {mesh.tp_size}"
        if mesh.cp_size > 1:
            product, sizes = "cp * tp", f"cp * tp = {mesh.cp_size} * {mesh.tp_size}"
        raise ValueError(
            f"Expected one of ep and {product} to divide the other for layers with a capacity, got "
            f"ep = {ep} and {sizes}. Change one, or use dMoE."
        )
    axis = mesh.axis("ep" if ep >= same else "cp_tp")
    assert axis is not None
    return axis.get_group()


def _count_sequences(
    layer: MoELayer, forward: Callable[..., MoEOutput], x: Tensor, **kwargs: Any
) -> MoEOutput:
    """In place of forward: tells dispatchers the number of sequences in x [..., S, D].

    Not a hook, since `apply_recompute` calls none again: passes of other numbers may lie between.
    """
    for dispatcher in (layer.dispatcher, layer.eval_dispatcher):
        if isinstance(dispatcher, GlobalCapacity):
            dispatcher.sequences = math.prod(x.shape[:-2])
    return forward(x, **kwargs)


def _count_valid(mesh: ParallelMesh) -> Callable[..., Any]:
    """A hook before forward: gives a layer with a mask its `valid_tokens`, a mean over cp ranks.

    Of padding they have unequal shares, and their losses are averaged.
    """

    def hook(layer: MoELayer, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("mask")
        if not isinstance(mask, Tensor) or kwargs.get("valid_tokens") is not None:
            return None
        valid_tokens = mesh.all_reduce(mask.count_nonzero(), "cp") / mesh.cp_size
        return args, {**kwargs, "valid_tokens": valid_tokens}

    return hook


def _sum_counts(mesh: ParallelMesh, axes: list[str]) -> Callable[[Tensor], Tensor]:
    """Tokens per expert summed over axes of the mesh, for a layer's `reduce_counts`."""

    def reduce_counts(counts_E: Tensor) -> Tensor:
        total_E = counts_E.clone()
        for axis in axes:
            mesh.all_reduce(total_E, axis)
        return total_E

    return reduce_counts


def _mean_losses(place: Place) -> Callable[..., Any]:
    """A forward hook: averages aux_loss over ranks that have parts of the same sequences."""

    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        return replaced(output, aux_loss=mean_over(output.aux_loss, place))

    return hook


class SharedTokens:
    """For tokens that all ranks of a group hold: each rank dispatches a share of them.

    Otherwise every expert would see each token once for each rank of the group.

    Args:
        inner: moves the share.
        place: the tensor-parallel group.
    """

    def __init__(self, inner: TokenDispatcher, place: Place) -> None:
        self.inner = inner
        self.place = place

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Dispatched:
        """Dispatch this rank's share; counts are those of all tokens."""
        tokens = x_TD.shape[0]
        padding = (0, 0, 0, -tokens % self.place.size)
        dispatched = self.inner.dispatch(
            split_rows(F.pad(x_TD, padding), self.place),
            split_rows(F.pad(weights_TK, padding), self.place),
            F.pad(expert_ids_TK, padding, value=-1).chunk(self.place.size)[self.place.rank],
        )
        mine = torch.cat((dispatched.tokens_per_expert_E, dispatched.kept_slots[None]))
        total = gathered(mine[None], self.place).sum(dim=0, dtype=torch.int32)
        return replaced(
            dispatched,
            tokens_per_expert_E=total[:-1],
            kept_slots=total[-1],
            state=_Share(dispatched.state, tokens),
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Combine the share, and join the shares of all ranks."""
        share: _Share = dispatched.state
        y_TD = self.inner.combine(y_RD, replaced(dispatched, state=share.inner))
        return join_rows(y_TD, self.place)[: share.tokens]


class _Share(NamedTuple):
    """The inner dispatcher's state, and the number of tokens before they were shared out."""

    inner: Any
    tokens: int
