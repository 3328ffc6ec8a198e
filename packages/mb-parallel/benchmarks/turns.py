"""Timing in turns: each call meets the clocks that the others leave."""

import random
from collections.abc import Callable, Mapping

import torch


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """GPU milliseconds of every call, one a round; a first round, which compiles, is not counted.

    The order is another one each round.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in random.sample(list(calls), len(calls)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # cycles, some 10 ms: in training, too, the host is ahead
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(start.elapsed_time(end))
    return times
