"""Data parallelism without sharding: every rank holds the weights and the optimizer's state.

A rank's model is what it would be in one process: nothing is gathered, weights lie where they lay,
so that CUDA graphs can hold its passes. Once a step, after the last backward, gradients are summed
over the ranks that hold the same parameters: those of experts over the copies of an expert, all
others over the data-parallel ranks. Then all take the same step (`optimizer.norm`).
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mb_kernels.uncompiled import uncompiled
from mb_layers import Experts
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from mb_parallel.engines import is_dtensor, is_fsdp
from mb_parallel.gradient_sync import keep_apart, watch
from mb_parallel.mesh import ParallelMesh
from mb_parallel.shards import all_reduce_together, local, local_grad, shaped_like, take_first

# Numbers that are put together for one collective, and copied for it: 128 MiB in fp32.
_BUCKET = 2**25

_Groups = tuple[dist.ProcessGroup, ...]


class Replicas:
    """Sums the gradients of a model after the last backward of a step; see `replicate`."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._last = True
        self._came: dict[int, Tensor] = {}  # parameters with gradients of this rank alone, by id
        # Shards of gradients that are sums, likewise, and how often they had been written.
        self._sums: dict[int, tuple[TensorWeakRef, int]] = {}
        self._used: tuple[int, ...] | None = None  # numbers of the parameters that came last,
        self._checksum = torch.empty(0)  # and [2], a checksum of these and its negative

    def __deepcopy__(self, memo: Any) -> Replicas:
        return Replicas(self._mesh)  # for the copy of a model, which runs its own hooks

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicas, (self._mesh,)  # likewise for one that was saved

    def expect(self, last: bool) -> None:
        """Say whether the next backward is the last."""
        self._last = last

    @uncompiled
    def follow(self, model: nn.Module, *_: Any) -> None:
        """A hook before forward, for one: watch parameters that `to` or `assign` put there."""
        watch(model)
        arrival = _Arrival(self, model)
        for parameter in model.parameters():
            # What `functional_call` puts in a parameter's place is none; integers have no gradient.
            has_gradient = parameter.is_floating_point() or parameter.is_complex()
            if isinstance(parameter, nn.Parameter) and has_gradient:
                _follow(parameter, arrival)

    def arrived(self, model: nn.Module, parameter: Tensor) -> None:
        """Note a gradient; sum all of this backward pass when it ends, if it is the last."""
        if self._is_a_sum(parameter):
            raise ValueError(
                "Expected no gradient that is summed over the ranks already, got one, to which "
                "this rank's was added. Call set_gradient_sync(model, False) before all backward "
                "passes of a step but the last, and zero_grad after the step."
            )
        if not self._came:
            keep_apart(model, True)
        self._came[id(parameter)] = parameter
        if self._last:
            # As FSDP2 does: torch has no public hook for the end of a backward pass.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(functools.partial(self.sum_arrived, model))

    def _is_a_sum(self, parameter: Tensor) -> bool:
        """Whether a gradient is a sum, though written since: scaled, or this rank's added to it."""
        if (grad := parameter.grad) is None or (sum_ := self._sums.get(id(parameter))) is None:
            return False
        return sum_[0]() is local(grad)

    def _is_as_summed(self, parameter: Tensor) -> bool:
        if (grad := parameter.grad) is None or not self._is_a_sum(parameter):
            return False
        return self._sums[id(parameter)][1] == local(grad)._version

    def sum_arrived(self, model: nn.Module) -> None:
        """Sum what came since the last time; nothing if it is summed."""
        if not self._came:
            return
        came, self._came = self._came, {}
        used = {i: p for i, p in enumerate(model.parameters()) if id(p) in came}
        self._check_same(tuple(used))
        self._sum(model, list(used.values()))

    def _check_same(self, used: tuple[int, ...]) -> None:
        """Refuse parameters, by number, that are not those of the other ranks: sums would mix."""
        axis = self._mesh.axis("dp")
        if axis is None:
            return
        if axis.device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # nothing can be read
        changed = used != self._used
        if changed:
            crc = zlib.crc32(repr(used).encode())
            self._used, self._checksum = used, torch.tensor([crc, -crc], device=axis.device_type)
        extremes = self._checksum.clone()
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=axis.get_group())
        # Of ranks that agreed some have to change before they differ. So no other host has to wait
        # for its GPU's backward pass.
        if (changed or not extremes.is_cuda) and bool(extremes.sum()):  # largest less smallest
            self._used = None
            raise ValueError(
                "Expected all ranks to use the same parameters in a step, got gradients of others "
                "on some rank. Let each rank use them all (a loss may add 0 * weight.sum()), or "
                "take zero_stage 1, 2 or 3 and set_reduce_scatter_unused_params."
            )

    def sum_all(self, model: nn.Module) -> None:
        """Sum all gradients, in place where they are in fp32."""
        parameters: list[Tensor] = list(model.parameters())
        if self._last and any(map(self._is_as_summed, parameters)):
            raise ValueError(
                "Expected gradients that are to be summed over the ranks, got sums, which the last "
                "backward pass left. Call set_gradient_sync(model, False) before passes whose "
                "gradients sum_gradients shall sum."
            )
        self._came.clear()
        self._sum(model, parameters)

    def forget(self, model: nn.Module, zeroed: set[int]) -> None:
        """Gradients of these parameters, by id, are gone or zero: they have not to be summed."""
        self._sums = {key: grad for key, grad in self._sums.items() if key not in zeroed}
        came = self._came.items()
        self._came = {key: p for key, p in came if key not in zeroed and p.grad is not None}
        keep_apart(model, bool(self._came))

    @torch.no_grad()
    def _sum(self, model: nn.Module, parameters: list[Tensor]) -> None:
        parameters = [p for p in parameters if p.grad is not None]
        groups_of = _groups_of(model, self._mesh)
        for bucket in _buckets(p for p in parameters if groups_of(p)):
            grads = [local_grad(p) for p in bucket]
            parts = [grad.to(_summed_in(grad)) for grad in grads]
            summed = all_reduce_together(parts, [groups_of(p) for p in bucket])
            for parameter, grad, total in zip(bucket, grads, summed, strict=True):
                if grad.dtype in (total.dtype, parameter.dtype):
                    grad.copy_(total)
                else:  # 16 bits, of a working copy
                    parameter.grad = shaped_like(total, parameter)
        for parameter in parameters:
            assert parameter.grad is not None
            shard = local(parameter.grad)
            self._sums[id(parameter)] = (TensorWeakRef(shard), shard._version)
        keep_apart(model, False)


class _Arrival:
    """A hook of a parameter whose gradient came."""

    def __init__(self, replicas: Replicas, model: nn.Module) -> None:
        self._replicas, self._model = replicas, weakref.ref(model)

    @property
    def matters(self) -> bool:
        """Whether the model is still there."""
        return self._model() is not None

    def __call__(self, parameter: Tensor) -> None:
        if (model := self._model()) is not None:
            self._replicas.arrived(model, parameter)


def replicate(model: nn.Module, mesh: ParallelMesh) -> Replicas:
    """Let the ranks of `mesh` hold replicas of `model`: the first rank's weights, summed gradients.

    Args:
        model: on the mesh's device; experts spread or whole.
        mesh: of several ranks.
    """
    groups_of = _groups_of(model, mesh)
    for parameter in model.parameters():
        take_first(parameter, groups_of(parameter))
    replicas = Replicas(mesh)
    replicas.follow(model)
    model.register_forward_pre_hook(replicas.follow)
    model.register_load_state_dict_post_hook(replicas.follow)
    return replicas


def refuse_spread(model: nn.Module, mesh: ParallelMesh) -> None:
    """Check that ranks that are to sum gradients of a parameter each have all of it, or one part.

    What FSDP2 shards in a module of the model is left alone.

    Raises:
        ValueError: a DTensor over these ranks.
    """
    groups_of = _groups_of(model, mesh)
    units: list[Any] = [module for module in model.modules() if is_fsdp(module)]
    sharded = {id(parameter) for unit in units for parameter in unit.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in sharded:
            continue
        summing = {rank for g in groups_of(parameter) for rank in dist.get_process_group_ranks(g)}
        if not is_dtensor(parameter) or not summing:
            continue
        spread = set(parameter.device_mesh.mesh.flatten().tolist())
        if spread & summing != {dist.get_rank()}:
            raise ValueError(
                f"Expected {name} to be the same on each of the ranks {sorted(summing)}, got a "
                f"DTensor over {sorted(spread)}. Spread parameters by parallelize_tensors and "
                "parallelize_experts alone, and call apply_data_parallel once, for a module that "
                "holds all that share them."
            )


def equal_shards(model: nn.Module, mesh: ParallelMesh) -> None:
    """Let groups of ranks that share a sharded model start with the first group's weights.

    FSDP2 adds up their gradients alone, so that groups that begin apart would stay apart.
    """
    groups_of = _groups_of(model, mesh, experts=("edp_replicate",), others=("dp_replicate",))
    for parameter in model.parameters():
        take_first(parameter, groups_of(parameter))


def _groups_of(
    model: nn.Module,
    mesh: ParallelMesh,
    experts: Sequence[str] = ("edp_replicate", "edp_shard"),
    others: Sequence[str] = ("dp",),
) -> Callable[[Tensor], _Groups]:
    """Says over which groups a parameter of the model is the same; none for one rank.

    Args:
        experts, others: the axes that these groups lie along, for both kinds of parameters.
    """

    def along(names: Sequence[str]) -> _Groups:
        axes = (mesh.axis(name) for name in names)
        return tuple(axis.get_group() for axis in axes if axis is not None)

    of_experts, of_others = along(experts), along(others)
    # Every step asks, and to go through all parameters would take the host more than twice as long.
    held = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    return lambda parameter: of_experts if id(parameter) in held else of_others


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters whose gradients are summed in one dtype, as many as go into a collective.

    The same on all ranks, although a working copy's gradient is in 16 bits after one micro-batch
    and in 32 after several, of which ranks may have different numbers.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        by_dtype.setdefault(_summed_in(parameter.grad), []).append(parameter)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        room = _BUCKET
        for parameter in alike:
            if bucket and room < local(parameter).numel():
                yield bucket
                bucket, room = [], _BUCKET
            bucket.append(parameter)
            room -= local(parameter).numel()
        yield bucket


def _summed_in(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _follow(parameter: Tensor, arrival: _Arrival) -> None:
    """Let a hook be called when a gradient comes, one for all models, also if it is frozen yet."""
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        # `to` puts another tensor into a DTensor's object, and autograd calls hooks of the tensor.
        parameter._post_accumulate_grad_hooks = hooks
        if any(isinstance(hook, _Arrival) and hook.matters for hook in hooks.values()):
            return
    trains = parameter.requires_grad
    parameter.requires_grad_(True).register_post_accumulate_grad_hook(arrival)
    parameter.requires_grad_(trains)
