"""What ranks do for all: a failure of one is everybody's, or the others would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from mb_parallel import of_all_ranks, rank, world_size

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
    """Rank 0 makes the files, the others find them made; raises as the other two."""
    result = on_rank_zero(make)
    return on_all_ranks(lambda: make() if result is None else result)


def on_all_ranks(act: Callable[[], T]) -> T:
    """What `act`, in which no rank waits for others, returns; all wait for its end.

    Raises:
        ValueError, OSError: what it raises here; a ValueError that says so, if on another rank.
    """
    failure = None
    try:
        result = act()
    except (ValueError, OSError) as error:
        failure = error
    told = of_all_ranks(failure and str(failure))
    if failure is not None:
        raise failure
    for other, said in enumerate(told):
        if said is not None:
            raise ValueError(
                f"Rank {other} of {len(told)} cannot go on, and all end with it: {said}"
            )
    return result
