"""Kernels that memory bounds, beside products that the matrix units bound: on a second stream.

    side = Beside(x)
    start = side.mark()
    product()                       # first, so that its programs have their places
    with side.after(start):
        copy(source, out=rows)      # beside the product; nothing is allocated here
    side.join()                     # from here on the caller's stream has waited for the copy

Between a fork and a join, as a CUDA graph can hold it. Memory belongs to the caller's stream: what
is written beside is allocated before, and what is read there is freed after the join.
"""

import contextlib
import functools
from collections.abc import Generator

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """The second stream of the device of ``x``, and the caller's."""

    def __init__(self, x: Tensor) -> None:
        self.main = torch.cuda.current_stream(x.device)
        self.side = _stream(x.device)

    def mark(self) -> torch.cuda.Event:
        """What the caller's stream has been given so far."""
        return self.main.record_event()

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event) -> Generator[None]:
        """Within: kernels go to the second stream, where they wait for ``mark`` alone."""
        self.side.wait_event(mark)
        with torch.cuda.stream(self.side):
            yield

    def join(self) -> None:
        """Have the caller's stream wait for the second."""
        self.main.wait_stream(self.side)
