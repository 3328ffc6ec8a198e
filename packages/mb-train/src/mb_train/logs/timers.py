"""Timers by name, and Megatron's lines about them: how long the fastest and the slowest rank took.

Level 0 times what happens once or seldom (set-up, checkpoints), level 1 the parts of a step, level
2 what is within those. A timer waits for the device at both ends, so levels 1 and 2 slow a step
down; above the level asked for a timer costs nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

import torch
from mb_parallel import of_all_ranks


class Clock:
    """Time spent training: what is paused does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap; the caller has just waited for the device."""
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        _wait(self._device)
        begun = time.perf_counter()
        yield
        _wait(self._device)
        self._start += time.perf_counter() - begun


class Timers:
    """The timers of one rank.

    Args:
        device: waited for at both ends of what is timed.
        level: the highest level that is timed.
        option: what `lines` says of the ranks' times: "minmax", "max" or "all".
    """

    def __init__(self, device: torch.device, *, level: int = 0, option: str = "minmax") -> None:
        self._device, self._level, self._option = device, level, option
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, level: int = 0) -> Generator[None]:
        """Time what happens in the context, added to what `name` has already."""
        if level > self._level:
            yield
            return
        _wait(self._device)
        begun = time.perf_counter()
        yield
        _wait(self._device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def collect(self, *names: str, steps: int = 1) -> dict[str, list[float]]:
        """Milliseconds per step of the named timers, or of all, by rank; they start anew.

        All ranks must call it at the same point.
        """
        wanted = names or tuple(self._seconds)
        mine = {name: self._seconds.pop(name) for name in wanted if name in self._seconds}
        ranks = of_all_ranks(mine)
        found = dict.fromkeys(name for each in ranks for name in each)
        return {
            name: [1000 * each[name] / steps for each in ranks if name in each] for name in found
        }

    def lines(self, *names: str) -> str:
        """Megatron's lines about the named timers, or all, which start anew; "" for none.

        All ranks must call it at the same point.
        """
        return timer_lines(self.collect(*names), self._option)


def timer_lines(times: dict[str, list[float]], option: str) -> str:
    """Megatron's lines about `times`, milliseconds of each rank by name; "" for none."""
    if not times:
        return ""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, ranks in times.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(ranks)]
        return "\n".join(lines)
    lines = ["(min, max) time across ranks (ms):"]
    for name, ranks in times.items():
        longest = f"{max(ranks):.2f}"
        said = longest if option == "max" else f"({min(ranks):.2f}, {longest})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {said}")
    return "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
