"""A rank's state as it is at one moment, to be written while the training goes on to change it.

It is copied on the device if that has room for a copy beside the largest step so far, else into
host memory, unless `Snapshots` is told where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mb_parallel.optimizer import local
from torch import Tensor

from mb_train.checkpoint.host_copy import HostCopier, allocating

# That fill a snapshot in host memory: 44 GB in 7.0 s beside one H100, other numbers were not tried
# (benchmarks/results/2026-11-26-h100.md).
_COPYING_THREADS = 8


class Snapshots:
    """Takes the snapshots of a run, each when the one before is no longer needed.

    What that one had of host memory is used again.

    Args:
        on_device: whether copies of what is on the device lie there too; None: if they fit.
    """

    def __init__(self, *, on_device: bool | None = None) -> None:
        self._on_device = on_device
        self._copier = HostCopier(_COPYING_THREADS)
        self._host: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's shards, by name.

        Those on the device are whole for what follows in the caller's stream, the others for all.

        Raises:
            MemoryError: there is none for them.
        """
        shards = {name: local(tensor).detach() for name, tensor in tensors.items()}
        here = fits_on_device(shards.values()) if self._on_device is None else self._on_device
        away = {name: shard for name, shard in shards.items() if not (shard.is_cuda and here)}
        with allocating():
            host = {name: self._memory_for(name, shard) for name, shard in away.items()}
            clones = {n: torch.empty_like(shard) for n, shard in shards.items() if n not in away}
        self._host = {}  # if copying fails, some of it may still be under way
        self._copier.fill((shard, host[name]) for name, shard in away.items())
        self._host = host
        for name, clone in clones.items():
            clone.copy_(shards[name])
        return clones | host

    def close(self) -> None:
        """End the threads that copy."""
        self._copier.close()

    def _memory_for(self, name: str, shard: Tensor) -> Tensor:
        kept, needed = self._host.get(name), torch.empty_like(shard, device="meta")
        if kept is not None and _kind(kept) == _kind(needed):
            return kept
        return torch.empty_like(needed, device="cpu")


def fits_on_device(shards: Iterable[Tensor]) -> bool:
    """Whether the GPU holds a copy beside the most that training has ever used."""
    on_gpu = [shard for shard in shards if shard.is_cuda]
    if not on_gpu:
        return False
    device = on_gpu[0].device
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    # A twentieth more, for what the allocator cannot put into the holes there are.
    return 1.05 * sum(shard.nbytes for shard in on_gpu) < free + unused


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
