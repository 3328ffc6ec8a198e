"""Copies of a GPU's tensors in ordinary host memory, by way of small pinned buffers.

What lies in the host's memory already is copied by the same threads.

A GPU copies several times faster into memory that is pinned. To pin it takes 0.8 s for 1 GB, and
the launches of other threads wait meanwhile (benchmarks/results/2026-11-25-two-h100s.md): so a few
buffers are pinned once, and emptied by threads of the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import torch
from torch import Tensor

_BUFFER_BYTES = 2**25


class HostCopier:
    """Copies from one GPU to the host, and within it.

    Args:
        threads: that copy at the same time, each with a buffer and a stream of its own.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="host-copies")
        self._own = threading.local()

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy in new memory, see `fill`."""
        copied = torch.empty_like(tensor, device="cpu")
        self.fill([(tensor, copied)])
        return copied

    def fill(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy tensors, those of the GPU as they are for the caller's stream, and wait for it.

        Args:
            pairs: of a tensor and memory of the host, such as its `torch.empty_like(device="cpu")`.

        Raises:
            MemoryError: none can be pinned.
        """
        pieces = [piece for pair in pairs for piece in pieces_of(*pair, _BUFFER_BYTES)]
        if not pieces:
            return
        on_gpu = next((source.device for source, _ in pieces if source.is_cuda), None)
        ready = None if on_gpu is None else torch.cuda.current_stream(on_gpu).record_event()
        for _ in self._pool.map(self._copy_piece, *zip(*pieces, strict=True), repeat(ready)):
            pass

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _copy_piece(self, source: Tensor, target: Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is None or not source.is_cuda:
            target.copy_(source)
            return
        own = self._own
        if not hasattr(own, "stream"):
            with allocating():
                own.buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(source.device)
        with torch.cuda.stream(own.stream):
            own.stream.wait_event(ready)
            pinned = own.buffer.view(source.dtype)[: len(source)]
            pinned.copy_(source, non_blocking=True)
            own.stream.synchronize()
        target.copy_(pinned)


def use_stream(stream: torch.cuda.Stream | None) -> None:
    """A thread begins on the first GPU and on the training's stream, where its copies would stand
    between the kernels of the steps; this one goes on in another, on the rank's GPU."""
    if stream is not None:
        torch.cuda.set_stream(stream)


@contextlib.contextmanager
def allocating() -> Generator[None]:
    """Raise MemoryError where memory runs short; torch raises a RuntimeError without a class."""
    try:
        yield
    except RuntimeError as error:
        said, *_ = str(error).splitlines() or [""]
        raise MemoryError(said) from error


def pieces_of(source: Tensor, target: Tensor, nbytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Flat views of two tensors, of at most so many bytes, piece by piece.

    Args:
        source: a tensor.
        target: as `torch.empty_like` makes it.
        nbytes: of a piece, a number's at least.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense(source):
        source = torch.empty_like(source).copy_(source)
    # In the order of memory, which is the same in both.
    flat = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in (source, target))
    return zip(*(tensor.split(nbytes // source.itemsize) for tensor in flat), strict=True)
