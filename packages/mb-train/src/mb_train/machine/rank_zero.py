"""What one rank does for all: a failure of it is everybody's, or the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from mb_parallel import rank, world_size

T = TypeVar("T")


def on_rank_zero(act: Callable[[], T]) -> T | None:
    """What `act` returns on rank 0; None on the others, which wait for its end.

    Raises:
        ValueError, OSError: on all ranks, what it raises.
        RuntimeError: on the others, if it raises anything else.
    """
    result = failure = told = None  # `told` is what the other ranks hear
    if rank() == 0:
        try:
            result = act()
        except (ValueError, OSError) as error:
            failure = told = error
        except Exception as error:  # unforeseen: rank 0 shows it
            failure, told = error, RuntimeError(f"Rank 0 failed: {type(error).__name__}: {error}")
    if world_size() > 1:
        verdict = [told]
        dist.broadcast_object_list(verdict, src=0)
        failure = failure or verdict[0]
    if failure is not None:
        raise failure
    return result


def on_rank_zero_first(make: Callable[[], T]) -> T:
    """Rank 0 makes the files, the others find them made; raises as `on_rank_zero`."""
    result = on_rank_zero(make)
    return make() if result is None else result
