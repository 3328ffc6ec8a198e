"""Copies of storages to the host's memory and back, beside what a GPU computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mb_parallel.engines import is_dtensor
from mb_parallel.shards import local, spread


class Kept:
    """A tensor that autograd saved, where it is."""

    def __init__(self, tensor: Tensor) -> None:
        # Itself would hold the graph that holds it; this has its count of writes.
        self._tensor = tensor.detach()
        self._version = self._tensor._version

    def tensor(self) -> Tensor:
        """What was saved; RuntimeError if it was written into since, which no one else notices."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "Expected a tensor that is kept for the backward pass not to change, got one of "
                f"{tuple(self._tensor.shape)} that was written into in place. Write into a copy."
            )
        return self._tensor


class Cargo:
    """A storage that travels, as bytes.

    Attributes:
        here: on the device; None while it is away.
        there: on the host; None until it has set out.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._original: Kept | None = Kept(tensor)
        self.here: Tensor | None = _as_bytes(tensor.detach())
        self.there: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of the storage; 0 if its memory was freed, as FSDP2 frees gathered weights."""
        held = self.there if self.here is None else self.here
        assert held is not None
        return held.untyped_storage().nbytes()

    def let_go(self) -> None:
        """Free the device's memory if there is a copy."""
        if self.there is not None:
            self.check()
            self.here = self._original = None

    def check(self) -> None:
        """Raise RuntimeError if the storage was written into since it was saved."""
        if self._original is not None:
            self._original.tensor()


class Saved:
    """A tensor that autograd saved, as a view of a cargo."""

    def __init__(self, cargo: Cargo, tensor: Tensor) -> None:
        self.cargo = cargo
        shard = local(tensor)
        self._view = shard.dtype, shard.storage_offset(), shard.shape, shard.stride()
        self._spread = None
        if is_dtensor(tensor):
            sizes = tensor.shape, tensor.stride()
            self._spread = tensor.device_mesh, tensor.placements, *sizes

    def tensor(self) -> Tensor:
        """What was saved, on the device, where the cargo is."""
        self.cargo.check()
        here = self.cargo.here
        assert here is not None
        dtype, *view = self._view
        shard = torch.empty(0, dtype=dtype, device=here.device)
        shard.set_(here.untyped_storage(), *view)
        return shard if self._spread is None else spread(shard, *self._spread)


class Copies:
    """To the host and back, in two streams of a GPU; on a CPU at once.

    Memory of the device is that of the stream which computes. It is freed there behind the copies
    out of it (`wait`), and the copies into it begin behind what was computed when it was allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, cargos: Sequence[Cargo]) -> torch.Event | None:
        """Let copies to the host begin; what happens when they are done."""
        pairs = []
        for cargo in cargos:
            if cargo.there is None and cargo.here is not None:
                pinned = self._streams is not None
                host = torch.empty(cargo.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                cargo.there = host
                pairs.append((cargo.here, host))
        return self._copy(pairs, 0)

    def back(self, cargos: Iterable[Cargo]) -> torch.Event | None:
        """Let copies to the device begin; what happens when they are done."""
        pairs = []
        for cargo in cargos:
            assert cargo.there is not None
            cargo.here = torch.empty_like(cargo.there, device=self._device)
            pairs.append((cargo.there, cargo.here))
        return self._copy(pairs, 1)

    def wait(self, done: torch.Event | None) -> None:
        """Let the stream that computes go on behind copies."""
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], way: int) -> torch.Event | None:
        if self._streams is None:
            for source, target in pairs:
                target.copy_(source)
            return None
        if not pairs:
            return None
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


def _as_bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, uint8, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
