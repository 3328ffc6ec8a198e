"""Timing in turns: a GPU at its power limit is up to 10% faster after a rest than after a minute.

Calls that are to be compared therefore run in short bursts, in a new random order each round. So
all of them run at the same clock and with caches that others have filled.
"""

import random
import time
from collections.abc import Callable, Mapping

import torch

_FLUSH_BYTES = 2**28  # several times the L2 of any GPU


def in_turns(
    calls: Mapping[str, Callable[[], object]], *, seconds: float = 3.0, burst_ms: float = 20.0
) -> dict[str, list[float]]:
    """GPU milliseconds of every call, sorted, by name.

    A burst is one call several times over, L2 flushed before each, for about ``burst_ms``; its
    first time, which finds the GPU idle, is not counted. Rounds go on for ``seconds``, three at
    least.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def burst(call: Callable[[], object], repeats: int) -> list[float]:
        events = []
        for _ in range(repeats + 1):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events[1:]]

    repeats = {}
    for name, call in calls.items():
        warm = burst(call, 3)[-1]
        repeats[name] = min(max(int(burst_ms / warm), 2), 50)
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop, rounds = time.monotonic() + seconds, 0
    while rounds < 3 or time.monotonic() < stop:
        rounds += 1
        for name in random.sample(list(calls), len(calls)):
            times[name] += burst(calls[name], repeats[name])
    return {name: sorted(values) for name, values in times.items()}


def median(values: list[float]) -> float:
    """Of a sorted list, the upper of two."""
    return values[len(values) // 2]


def eight_of_ten(values: list[float]) -> str:
    """Where eight of ten values of a sorted list lie."""
    tenth = len(values) // 10
    return f"{values[tenth]:.4g}..{values[-1 - tenth]:.4g}"
