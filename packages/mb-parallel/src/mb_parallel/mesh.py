"""Process groups: which rank plays which part in data, tensor, pipeline and expert parallelism.

One world of ranks is seen twice. Dense layers see it as (pp, dp_replicate, dp_shard, tp), tensor
parallel fastest, so that the ranks which talk most sit next to each other on a node. Expert layers
see the ranks of a pipeline stage as (edp_replicate, edp_shard, ep): each group of ep ranks holds
all experts of a layer once, and the edp = dp * tp / ep groups are replicas whose gradients are
summed. This is the two-view idea of torchtitan's `ParallelDims`. Sixteen ranks as dp_replicate = 2,
dp_shard = 2, tp = 2, pp = 2, with ep = 4:

                      pp 0                      pp 1
                  tp 0   tp 1               tp 0   tp 1
    replicate 0   --------------            --------------
      shard 0       0      1                  8      9        The same ranks for the experts:
      shard 1       2      3                 10     11
    replicate 1   --------------            --------------           ep 0  1  2  3
      shard 0       4      5                 12     13        edp 0     0  1  2  3
      shard 1       6      7                 14     15        edp 1     4  5  6  7     (pp 0)
                                                              edp 0     8  9 10 11
    dp groups  {0, 2, 4, 6} {1, 3, 5, 7} ...                  edp 1    12 13 14 15     (pp 1)

Sequences see the dp ranks as (data, cp). The cp ranks of a group are neighbours in dp, share their
samples, and hold successive parts of every sequence. All else about them is what it is about
data-parallel ranks: parameters and their shards, gradients, experts, checkpoints. In the picture,
with cp = 2, {0, 2} see one part of the samples and {4, 6} the other.

Ranks are numbered node by node (`torchrun` does), so tp and cp, and ep up to a node's size, stay
within a node; pp, which sends least, spans nodes first.

A single process needs no process group and gets none: every axis is None and nothing is paid.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mb_parallel.arguments import at_least_1, device_type_name
from mb_parallel.world import check_same, of_all_ranks, rank, ranks_on_host, world_size

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep")
_OTHER_AXES = ("dp", "cp", "cp_tp")
_SIZES = "_mb_sizes"


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The size of each kind of parallelism; `dp_replicate * dp_shard * tp * pp` ranks in all.

    Args:
        dp_replicate: whole replicas of the sharded model, which see different samples.
        dp_shard: ranks that see different samples and share one copy of the parameters.
        cp: of these, neighbours that see the same samples, each a part of every sequence; divides
            dp_replicate * dp_shard. A group may lie across replicas.
        tp: ranks that share every weight matrix of the dense layers, and their samples.
        pp: pipeline stages.
        ep: ranks that share the experts of a layer; divides dp_replicate * dp_shard * tp.

    Raises:
        ValueError: a size that is no integer of at least 1, or a `cp` or `ep` that does not divide.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            size = getattr(self, name)
            at_least_1(**{name: size})
            object.__setattr__(self, name, int(size))  # of NumPy's, of which torch makes no mesh
        if self.dp % self.cp:
            raise ValueError(
                f"Expected cp to divide the {self.dp} data-parallel ranks (all ranks / (tp * pp)), "
                f"got {self.cp}."
            )
        if (self.dp * self.tp) % self.ep:
            raise ValueError(
                f"Expected ep to divide the {self.dp * self.tp} ranks of a pipeline stage (all "
                f"ranks / pp), got {self.ep}."
            )

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        cp: int = 1,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        dp_replicate: int = 1,
    ) -> ParallelDims:
        """Work out `dp_shard` from the number of ranks and the other sizes.

        Raises:
            ValueError: `dp_replicate * tp * pp` does not divide `world_size`, or a bad size.
        """
        at_least_1(world_size=world_size)
        sizes = cls(dp_replicate=dp_replicate, tp=tp, pp=pp)
        dp_shard, rest = divmod(world_size, sizes.world_size)
        if rest or not dp_shard:
            raise ValueError(
                "Expected dp_replicate * tp * pp to divide the number of ranks, got "
                f"{dp_replicate} * {tp} * {pp} = {sizes.world_size} on {world_size} ranks. "
                f"Start a multiple of {sizes.world_size} processes or change a size."
            )
        return cls(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp, ep=ep)

    @property
    def world_size(self) -> int:
        """Ranks that these sizes need."""
        return self.dp * self.tp * self.pp

    @property
    def dp(self) -> int:
        """Data-parallel size: ranks of a stage that see different tokens (times tp)."""
        return self.dp_replicate * self.dp_shard

    @property
    def data(self) -> int:
        """Groups of cp ranks, which see different samples."""
        return self.dp // self.cp

    @property
    def cp_tp(self) -> int:
        """Ranks of a stage that see the same samples."""
        return self.cp * self.tp

    @property
    def edp(self) -> int:
        """Copies of a layer's experts within a pipeline stage."""
        return self.dp * self.tp // self.ep

    @property
    def edp_replicate(self) -> int:
        """The part of `edp` that is replicated; experts are sharded over the rest.

        `dp_replicate` wherever a group of ep ranks lies within one replica.
        """
        return math.gcd(self.edp, self.dp_replicate)

    @property
    def edp_shard(self) -> int:
        """The part of `edp` that experts are sharded over."""
        return self.edp // self.edp_replicate

    def build(self, device_type: str) -> ParallelMesh:
        """Make the process groups; every rank calls it.

        Args:
            device_type: "cpu" or "cuda", as for `distributed`.

        Raises:
            ValueError: the product of the sizes is not the number of ranks, or ranks have others.
        """
        device_type_name(device_type)
        ranks = world_size()
        # This also finds a rank that is gone. Making groups would wait half an hour for it.
        check_same(self, "ParallelDims")
        if ranks != self.world_size:
            raise ValueError(
                f"Expected dp_replicate * dp_shard * tp * pp to be the number of ranks, {ranks}, "
                f"got {self.dp_replicate} * {self.dp_shard} * {self.tp} * {self.pp} = "
                f"{self.world_size}. Start {self.world_size} processes (torchrun --nproc_per_node, "
                "--nnodes) or change a size."
            )
        if ranks == 1:
            return ParallelMesh(self, None, None, None)
        self._warn_of_spread_nodes()
        _forget_earlier_meshes()
        dense_sizes = (self.pp, self.dp_replicate, self.dp_shard, self.tp)
        dense = init_device_mesh(device_type, dense_sizes, mesh_dim_names=DENSE_AXES)
        dp = dense["dp_replicate", "dp_shard"]._flatten("dp")
        expert_sizes = (self.pp, self.edp_replicate, self.edp_shard, self.ep)
        expert = init_device_mesh(device_type, expert_sizes, mesh_dim_names=EXPERT_AXES)
        context = cp_tp = None
        if self.cp > 1:
            sizes = (self.pp * self.data, self.cp, self.tp)
            context = init_device_mesh(device_type, sizes, mesh_dim_names=("others", "cp", "tp"))
            cp_tp = context["cp", "tp"]._flatten("cp_tp")
        mesh = ParallelMesh(self, dense, expert, dp, context, cp_tp)
        keep_timeout(mesh.groups)
        return mesh

    def _warn_of_spread_nodes(self) -> None:
        on_node = ranks_on_host()
        if on_node % self.tp and rank() == 0:
            warnings.warn(
                f"tp = {self.tp} does not divide the {on_node} ranks of a node: some tensor-"
                "parallel groups span nodes, whose links are an order of magnitude slower. Make "
                "tp a divisor of --nproc_per_node.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class ParallelMesh:
    """The groups of one rank, made by `ParallelDims.build`; also for a process without a group.

    dims: the sizes.
    dense: mesh with axes `DENSE_AXES`, or None for one process.
    expert: the same ranks with axes `EXPERT_AXES`, or None.
    dp: the one-dimensional mesh of dp_replicate and dp_shard in one, or None.
    context: where cp > 1 the same ranks with axes "cp" and "tp" behind a first one, else None.
    cp_tp: the one-dimensional mesh of these two in one, or None.
    """

    dims: ParallelDims
    dense: DeviceMesh | None
    expert: DeviceMesh | None
    dp: DeviceMesh | None
    context: DeviceMesh | None = None
    cp_tp: DeviceMesh | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of all axes, each once, in the order in which they were made; one of all ranks
        may be the world's own."""
        meshes = (self.dense, self.dp, self.expert, self.context, self.cp_tp)
        groups = [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]
        return list(dict.fromkeys(groups))

    def close(self) -> None:
        """Destroy the groups that were made for this mesh; every rank calls it, if it can.

        For processes that go on, and build another one: a group has threads and connections, or
        memory on the GPU. The world's own group stays. What lies on the mesh, parameters or their
        shards, can still be read, but nothing sent. Threads of gloo end with the last reference
        to a group; meshes refer to themselves, so that is when garbage is collected. (Torch 2.11
        keeps some references, and so these threads.)
        """
        for group in reversed(self.groups):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        _forget_earlier_meshes()

    def axis(self, name: str) -> DeviceMesh | None:
        """The one-dimensional mesh of an axis, None if it has a single rank.

        Args:
            name: of `DENSE_AXES` or `EXPERT_AXES`, or "dp": dp_replicate and dp_shard in one, or
                "cp", or "cp_tp": the ranks that see the same samples, in the order of their parts
                of a sequence.

        Raises:
            ValueError: no such axis.
        """
        if name not in (*DENSE_AXES, *EXPERT_AXES, *_OTHER_AXES):
            known = ", ".join((*DENSE_AXES, *_OTHER_AXES, *EXPERT_AXES[1:]))
            raise ValueError(f"Expected an axis of {known}, got {name!r}.")
        if getattr(self.dims, name) == 1:
            return None
        if name == "cp_tp" and self.dims.cp == 1:
            name = "tp"
        if name in ("dp", "cp_tp"):
            return self.dp if name == "dp" else self.cp_tp
        mesh = self.dense
        if name in EXPERT_AXES[1:]:
            mesh = self.expert
        elif name == "cp":
            mesh = self.context
        assert mesh is not None
        return mesh[name]

    def all_reduce(
        self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Reduce `tensor` in place over an axis and return it; nothing is sent for one rank."""
        mesh = self.axis(axis)
        if mesh is not None:
            # Of what has gaps in memory, such as a column, gloo reduces the numbers in the gaps.
            together = tensor.contiguous()
            dist.all_reduce(together, op=op, group=mesh.get_group())
            if together is not tensor:
                tensor.copy_(together)
        return tensor

    def _rank(self, name: str) -> int:
        mesh = self.axis(name)
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.dims.dp

    @property
    def dp_rank(self) -> int:
        """Which tokens this rank sees: 0 to dp_size - 1, the same for all of a tp and pp group."""
        return self._rank("dp")

    @property
    def data_size(self) -> int:
        return self.dims.data

    @property
    def data_rank(self) -> int:
        """Which samples this rank sees: 0 to data_size - 1, the same for all of a cp group too."""
        return self.dp_rank // self.dims.cp

    @property
    def cp_size(self) -> int:
        return self.dims.cp

    @property
    def cp_rank(self) -> int:
        """Which part of every sequence this rank sees: 0 to cp_size - 1, in their order."""
        return self._rank("cp")

    @property
    def tp_size(self) -> int:
        return self.dims.tp

    @property
    def tp_rank(self) -> int:
        return self._rank("tp")

    @property
    def pp_size(self) -> int:
        return self.dims.pp

    @property
    def pp_rank(self) -> int:
        return self._rank("pp")

    @property
    def ep_size(self) -> int:
        return self.dims.ep

    @property
    def ep_rank(self) -> int:
        return self._rank("ep")


def _forget_earlier_meshes() -> None:
    """Empty DTensor's caches, whose results lie on the mesh of the first call with its like.

    An equal mesh may have been there before, with groups that are gone, or whose names are by now
    those of groups of other ranks.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    # All of it private; there from torch 2.11 to 2.15.
    with suppress(ImportError):
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    with suppress(ImportError, AttributeError):
        from torch.distributed.tensor import _collective_utils, _redistribute

        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()


def keep_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give new groups the timeout of the world's group instead of torch's default."""
    world = dist.group.WORLD
    assert world is not None
    for group in groups:
        for device in group._device_types:
            # A group of gloo may be beside a world of NCCL alone.
            same = device if device in world._device_types else world._device_types[0]
            options = getattr(world._get_backend(same), "options", None)
            if options is not None:  # a fake group has none
                group._get_backend(device)._set_default_timeout(options._timeout)


@contextmanager
def refused_alike(mesh: ParallelMesh, axis: str | None = None) -> Generator[None]:
    """Within: what one rank refuses (ValueError) all refuse; every rank of the mesh enters it.

    Given an axis of several ranks, those that lie along it with this one.

    Else the others would wait for this one. Within it a rank may wait for others only where they
    refuse together, as those of a group do in `check_same`.
    """
    problem = None
    try:
        yield
    except ValueError as error:
        problem = error
    along = None if axis is None else mesh.axis(axis)
    group = None if along is None else along.get_group()
    # A mesh of one process may be one rank's own, though there be others.
    told = [] if mesh.dense is None else of_all_ranks(problem and str(problem), group)
    if problem is not None:
        raise problem
    for other in filter(None, told):
        raise ValueError(other)


def check_mesh(mesh: Any, model: nn.Module | None = None) -> None:
    """Raise ValueError if `mesh` is not from `ParallelDims.build`, or not of the model's sizes.

    Args:
        model: whose sizes `keep_sizes` may have noted.
    """
    if not isinstance(mesh, ParallelMesh):
        raise ValueError(
            f"Expected a ParallelMesh, got {type(mesh).__name__}. Make one with "
            "ParallelDims.for_world(world_size(), ...).build(device_type)."
        )
    told = getattr(model, _SIZES, mesh.dims)
    if told != mesh.dims:
        raise ValueError(
            f"Expected a mesh of {told}, as in an earlier call for this model, got one of "
            f"{mesh.dims}. Build one mesh, and pass it to every call."
        )


def keep_sizes(mesh: ParallelMesh, model: nn.Module) -> None:
    """Note that `model` is spread over meshes of these sizes."""
    setattr(model, _SIZES, mesh.dims)
