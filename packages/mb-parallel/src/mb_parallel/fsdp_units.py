"""The units of a model that FSDP2 gathers and reduces, and their sharding."""

# Not in `data_parallel`, because one process need not import FSDP2: see `engines`.

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from mb_layers import Experts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointFunction

from mb_parallel.engines import torch_release
from mb_parallel.gradient_sync import groups_of, has_gradient, keep_frozen
from mb_parallel.mesh import ParallelMesh
from mb_parallel.recompute import recomputed
from mb_parallel.shards import local

# In stages 1 and 2 blocks are joined until a unit has this many parameters, because matrix products
# wait for the multiprocessors that a collective occupies. GPT-2 125M on two H200s (2026-11-22):
# 1,074 k tokens/s with blocks of 7 M parameters, 1,091 k with units of 32 M or more.
_JOINED = 2**25


def shard_units(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    blocks: Iterable[nn.Module],
    compute_dtype: torch.dtype,
    keep_fp32: Iterable[nn.Module],
    in_training: Iterable[nn.Module],
    reshard: bool,
    cast_inputs: bool,
) -> None:
    """Shard `model` as `apply_data_parallel` says, whose arguments these are.

    Args:
        reshard: free gathered weights after each pass through a unit, as in stage 3.
    """
    assert mesh.dense is not None
    dense = _sharding_mesh(mesh.dense, "dp_replicate", "dp_shard")
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=_summed_in(compute_dtype),
        cast_forward_inputs=cast_inputs,
    )
    uncast = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    apart_in = (recomputed(model), set(in_training))
    if compute_dtype != torch.float32:
        for unit in _units(keep_fp32, reshard, apart_in):
            _shard(unit, mesh=dense, mp_policy=uncast, reshard_after_forward=reshard)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    alone: set[nn.Parameter] = set()
    if mesh.dims.edp > 1:
        for sharing in _sharing(experts):
            _shard_experts(sharing, mesh, compute_dtype, reshard)
    else:
        alone = _parameters(experts)
    _refuse_ties(model, blocks, alone | _parameters(_inner_units([model])))
    common: dict[str, Any] = {"mesh": dense, "mp_policy": policy, "ignored_params": alone}
    # FSDP2 of torch 2.11 casts what the first module of a unit is given, and no other.
    apart = reshard or (cast_inputs and torch_release() < (2, 13))
    for unit in _units(blocks, apart, apart_in[1:], alone):
        _shard(unit, reshard_after_forward=reshard, **common)
    # What no block owns (embeddings, final norm, head) is used at both ends of a pass: keep it.
    _shard([model], reshard_after_forward=False, **common)
    for unit in _inner_units([model]):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # else torch multiplies by 1 on the way


def _summed_in(compute_dtype: torch.dtype) -> torch.dtype:
    """What gradients are summed in: fp32, or fp64 where that is computed in."""
    return torch.promote_types(compute_dtype, torch.float32)


def _units(
    modules: Iterable[nn.Module],
    apart: bool,
    kinds: Sequence[Set[nn.Module]],
    alone: Set[nn.Parameter] = frozenset(),
) -> list[list[nn.Module]]:
    """Modules joined to units of `_JOINED` parameters, or each by itself.

    Args:
        kinds: modules that run where others do not: a second time, or in training alone. They are
            joined with their like, because a unit is freed when all of its modules have run, and
            FSDP2 of torch 2.11 warns if not all do.
        alone: parameters that do not count.
    """
    units: list[list[nn.Module]] = []
    latest: dict[tuple[bool, ...], list[nn.Module]] = {}
    room: defaultdict[tuple[bool, ...], int] = defaultdict(int)
    for sharing in _sharing(modules, alone):
        like = tuple(not kind.isdisjoint(sharing) for kind in kinds)
        if room[like] <= 0 or apart:
            units.append([])
            latest[like], room[like] = units[-1], _JOINED
        latest[like] += sharing
        room[like] -= sum(local(p).numel() for p in _parameters(sharing) - alone)
    return units


def _sharing(
    modules: Iterable[nn.Module], alone: Set[nn.Parameter] = frozenset()
) -> list[list[nn.Module]]:
    """Each module once, grouped by shared parameters: FSDP2 needs those in one unit."""
    groups: list[list[nn.Module]] = []
    for module in dict.fromkeys(modules):
        mine = _parameters([module]) - alone
        tied = [group for group in groups if not mine.isdisjoint(_parameters(group) - alone)]
        groups = [group for group in groups if group not in tied]
        groups.append([*(m for group in tied for m in group), module])
    return groups


def _refuse_ties(model: nn.Module, blocks: Iterable[nn.Module], apart: Set[nn.Parameter]) -> None:
    """Raise ValueError for a parameter of a block that what no block owns has too: of two units.

    Args:
        apart: parameters that are no block's, whatever module has them.
    """
    inside = {module for block in blocks for module in block.modules()}
    names: defaultdict[nn.Parameter, dict[bool, str]] = defaultdict(dict)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            names[parameter].setdefault(module in inside, name)
    for parameter, by_place in names.items():
        if len(by_place) > 1 and parameter not in apart:
            raise ValueError(
                f"Expected parameters of blocks that blocks alone have, got {by_place[True]}, "
                f"which is {by_place[False]} too. Make the modules of both blocks, or neither."
            )


def _inner_units(modules: Iterable[nn.Module]) -> list[Any]:
    return [m for one in modules for m in one.modules() if isinstance(m, FSDPModule)]


def _parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def _shard(
    unit: list[nn.Module], *, ignored_params: Set[nn.Parameter] = frozenset(), **options: Any
) -> None:
    """`fully_shard`, after a check that torch makes only at the first forward pass."""
    mine = _parameters(unit) - _parameters(_inner_units(unit)) - ignored_params
    dtypes = sorted({str(p.dtype) for p in mine if p.requires_grad})
    if len(dtypes) > 1:
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in unit))
        raise ValueError(
            "Expected parameters of one dtype to train in the blocks, and of one in what no block "
            f"owns, got {' and '.join(dtypes)} in {names}. Give all one dtype, or pass the modules "
            "that are in fp32 as `keep_fp32`, with a `compute_dtype` of 16 bits."
        )
    for parameter in mine:
        if not parameter.is_contiguous():  # a transposed weight, which `fully_shard` refuses
            parameter.data = parameter.data.contiguous()
    fully_shard(unit, ignored_params=set(ignored_params), **options)
    if options["mesh"].ndim > 1 and torch_release() < (2, 15):
        for group in groups_of(unit[0]):
            group.post_backward = _SameParameters(group)
    look, follow = _Reentrant(), functools.partial(_follow_frozen, unit[0])
    copies = _Copies()
    for module in unit:
        module.register_forward_pre_hook(copies.ahead, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(copies.behind, with_kwargs=True)
        module.register_forward_hook(copies.after)
        module.register_forward_pre_hook(look, prepend=True)
        module.register_forward_pre_hook(follow, prepend=True)


def _follow_frozen(unit: Any, *_: Any) -> None:
    """A hook before forward."""
    if not torch.compiler.is_compiling():
        keep_frozen(unit, trains=torch.is_grad_enabled())


class _Copies:
    """Hooks of the modules of a unit: refuse that one writes into a copy of what it is given.

    FSDP2 gives modules copies of lists, dicts and dataclasses where it casts inputs, and else of
    those that hold a tensor with a gradient. The caller would find nothing of what is written
    there: a loss that blocks put into a list would not train, and what one takes out of it would be
    there for the next. Of dicts this is not refused: many a model writes there what it alone reads.
    """

    def __init__(self) -> None:
        self._callers: dict[nn.Module, list[Any]] = {}
        self._copies: dict[nn.Module, list[tuple[Any, list[Any]]]] = {}

    def ahead(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before FSDP2's, which makes copies."""
        if not torch.compiler.is_compiling():
            self._callers[module] = list(_writable((args, kwargs)))

    def behind(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook after it, before forward."""
        if torch.compiler.is_compiling():
            return
        callers = self._callers.pop(module, [])
        known = set(map(id, callers))
        copies = (given for given in _writable((args, kwargs)) if id(given) not in known)
        self._copies[module] = [(copy, _entries(copy)) for copy in copies]

    def after(self, module: nn.Module, *_: Any) -> None:
        """A hook after forward."""
        if torch.compiler.is_compiling():
            return
        for copy, before in self._copies.pop(module, []):
            if list(map(id, _entries(copy))) != list(map(id, before)):
                name = type(module).__name__.removeprefix("FSDP")
                raise ValueError(
                    f"Expected modules that return what they compute, got a {name} that writes "
                    f"into a {type(copy).__name__} it is given: FSDP2 gives it a copy, and the "
                    "caller would find nothing of it. Return it, or take zero_stage 0."
                )


def _writable(given: Any) -> Iterator[Any]:
    """The lists and dataclasses in what a module is given, however nested."""
    if isinstance(given, list) or (is_dataclass(given) and not isinstance(given, type)):
        yield given
        within = _entries(given)
    elif isinstance(given, tuple | dict):
        within = given.values() if isinstance(given, dict) else given
    else:
        return
    for inner in within:
        yield from _writable(inner)


def _entries(given: Any) -> list[Any]:
    if isinstance(given, list):
        return [*given]
    return [getattr(given, field.name, None) for field in fields(given)]


class _SameParameters:
    """A group's `post_backward`, which refuses micro-batches that FSDP2 would mix up.

    Among replicas of sharded groups a group keeps what its ranks have added up of the micro-batches
    before the last: one tensor of the parameters that had gradients, end to end. Before torch 2.15
    the next micro-batch is added to it as it is, even if it has gradients of other parameters.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._reduce = group, group.post_backward
        self._kept: list[int] = []

    def __call__(self, *args: Any) -> None:
        group = self._group
        used = [i for i, held in enumerate(group.fsdp_params) if has_gradient(held)]
        unused_too = getattr(group, "reduce_scatter_unused_params", False)  # since torch 2.13
        if used and group.reduce_grads and not unused_too:
            if group._partial_reduce_output is not None and used != self._kept:
                names = (type(module).__name__.removeprefix("FSDP") for module in group.modules)
                raise ValueError(
                    "Expected all micro-batches of a step to use the same parameters of "
                    f"{', '.join(names)}, got one that uses others than the one before: torch "
                    f"{torch.__version__} would mix their gradients up. Call the model's "
                    "set_reduce_scatter_unused_params(True) (from torch 2.13 on), or take "
                    "zero_stage 0 or 1, or torch 2.15."
                )
            self._kept = used
        self._reduce(*args)


class _Reentrant:
    """A hook before the forwards of a unit: refuses reentrant checkpoints that FSDP2 sums wrongly.

    Such a checkpoint runs its modules without gradients, and again in a backward pass of its own
    within that of the model, at whose end FSDP2 takes a module for done. What a unit of several
    needs for its backward pass it prepares behind the last one, unless that ran without gradients;
    from torch 2.13 on a unit that ran without them altogether does so later.
    """

    def __init__(self) -> None:
        self._forwards = 0
        # Of each module's latest forward pass the number, and whether it was one with gradients.
        self._latest: dict[nn.Module, tuple[int, bool]] = {}
        # In which backward pass, and of which checkpoint, a module ran last.
        self._again: dict[nn.Module, tuple[int, int]] = {}

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # in a compiled module nothing is left of this
            return
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._forwards += 1
            self._latest[module] = self._forwards, torch.is_grad_enabled()
        elif torch.is_grad_enabled() and getattr(node, "_forward_cls", None) is CheckpointFunction:
            self._check(module, (torch._C._current_graph_task_id(), id(node)))

    def _check(self, module: nn.Module, here: tuple[int, int]) -> None:
        before, self._again[module] = self._again.get(module, (-1, -1)), here
        number, _ = self._latest.get(module, (0, False))
        others = [latest for other, latest in self._latest.items() if other is not module]
        is_last = bool(others) and all(theirs < number for theirs, _ in others)
        late = torch_release() >= (2, 13) and not any(grad for _, grad in others)
        if before[0] == here[0] and before != here:
            what = "has several in a pass"
        elif is_last and not late:
            what = "is the last of several that are gathered together"
        else:
            return
        raise ValueError(
            f"Expected checkpoints with use_reentrant=False, got one with True of a "
            f"{type(module).__name__} that {what}: gradients would be wrong. Pass False to "
            "torch.utils.checkpoint, or call apply_recompute instead."
        )


def _sharding_mesh(mesh: DeviceMesh, replicate: str, shard: str) -> DeviceMesh:
    """Both axes, for FSDP2's hybrid sharding; without replicas only the second."""
    return mesh[shard] if mesh[replicate].size() == 1 else mesh[replicate, shard]


def _shard_experts(
    experts: list[nn.Module], mesh: ParallelMesh, compute_dtype: torch.dtype, reshard: bool
) -> None:
    assert mesh.expert is not None
    shards = mesh.dims.edp_shard

    def placement(parameter: nn.Parameter) -> Shard | None:
        # By experts if there are enough for all ranks, otherwise by width.
        few = local(parameter).shape[0] < shards
        return Shard(1) if few and local(parameter).shape[1] % shards == 0 else None

    # Inputs have the block's dtype already, and routing weights have to stay in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=_summed_in(compute_dtype),
        cast_forward_inputs=False,
    )
    expert_mesh = _sharding_mesh(mesh.expert, "edp_replicate", "edp_shard")
    _shard(
        experts,
        mesh=expert_mesh,
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )
