"""Process groups: which rank plays which part in data, tensor, pipeline and expert parallelism.

One world of ranks is seen twice. Dense layers see it as (pp, dp, tp), tensor parallel fastest, so
that the ranks which talk most sit next to each other. Expert layers see the same ranks of a stage
as (pp, edp, ep), where ep divides dp * tp: each group of ep ranks holds all experts once, and the
edp groups are replicas that average their gradients. This is the two-view idea of torchtitan's
`ParallelDims`.

A single process needs no process group and gets none: the meshes are None and nothing is paid.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Sizes of the four ways to share a model; `dp * tp * pp` is the number of ranks.

    Args:
        dp: replicas (or shards) that see different samples.
        tp: ranks that share every weight matrix.
        pp: pipeline stages.
        ep: ranks that share the experts of a layer; divides `dp * tp`.

    Raises:
        ValueError: a size below 1, or an `ep` that does not divide `dp * tp`.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"Expected {name} to be an integer of at least 1, got {size!r}.")
        if (self.dp * self.tp) % self.ep:
            raise ValueError(
                f"Expected ep to divide dp * tp, got ep = {self.ep} and dp * tp = "
                f"{self.dp} * {self.tp} = {self.dp * self.tp}."
            )

    @property
    def world_size(self) -> int:
        """Ranks that these sizes need."""
        return self.dp * self.tp * self.pp

    @classmethod
    def for_world(cls, world_size: int, *, tp: int = 1, pp: int = 1, ep: int = 1) -> ParallelDims:
        """Give every rank that `tp` and `pp` leave over to data parallelism.

        Raises:
            ValueError: `tp * pp` does not divide `world_size`.
        """
        if world_size % (tp * pp):
            raise ValueError(
                f"Expected tp * pp to divide the world size, got tp * pp = {tp} * {pp} = "
                f"{tp * pp} on {world_size} ranks."
            )
        return cls(dp=world_size // (tp * pp), tp=tp, pp=pp, ep=ep)

    def build_mesh(self, device_type: str) -> DeviceMesh | None:
        """The dense view: a mesh with axes ("pp", "dp", "tp"), or None for one process.

        Raises:
            ValueError: the product of the sizes is not the number of ranks.
        """
        return self._build(device_type, ("pp", "dp", "tp"), (self.pp, self.dp, self.tp))

    def build_expert_mesh(self, device_type: str) -> DeviceMesh | None:
        """The expert view of the same ranks: axes ("pp", "edp", "ep"), or None for one process.

        Raises:
            ValueError: the product of the sizes is not the number of ranks.
        """
        edp = self.dp * self.tp // self.ep
        return self._build(device_type, ("pp", "edp", "ep"), (self.pp, edp, self.ep))

    def _build(
        self, device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]
    ) -> DeviceMesh | None:
        ranks = world_size()
        if ranks != self.world_size:
            raise ValueError(
                f"Expected dp * tp * pp to be the number of ranks, {ranks}, got "
                f"{self.dp} * {self.tp} * {self.pp} = {self.world_size}. "
                f"Start {self.world_size} processes (torchrun --nproc_per_node) or change a size."
            )
        if ranks == 1:
            return None
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)


@contextmanager
def distributed(device_type: str) -> Generator[torch.device]:
    """Join the process group that `torchrun` describes; yield this rank's device; leave at the end.

    Without `torchrun` (no WORLD_SIZE, or 1) no group is made; one that is there already is used,
    and not left. On GPUs the group carries NCCL (RCCL
    on ROCm) for device tensors and gloo for host tensors, so that flags and checkpoint plans are
    exchanged without touching the device.

    Args:
        device_type: "cpu" or "cuda" (ROCm answers to "cuda" as well).

    Raises:
        ValueError: more ranks on this host than devices.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        devices = torch.cuda.device_count()
        if local_rank >= devices:
            raise ValueError(
                f"Expected at most one rank per GPU, got local rank {local_rank} on a host with "
                f"{devices}. Lower --nproc_per_node."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if ranks == 1 or dist.is_initialized():
        yield device
        return
    if device_type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank: a small host-side all-reduce, free for one process."""
    if not dist.is_initialized():
        return flag
    vote = torch.tensor(int(flag), dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())
