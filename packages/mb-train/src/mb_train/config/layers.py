"""Which layers are otherwise than the rest: every n-th of them, or those of a list."""

from __future__ import annotations

from collections.abc import Sequence


def every_nth_full(windows: Sequence[bool]) -> int | None:
    """n if all layers have a window but every n-th; None for other patterns.

    Of layers that all have one it is more than they are.
    """
    layers = len(windows)
    every = list(windows).index(False) + 1 if False in windows else layers + 1
    fits = all(near == ((layer + 1) % every != 0) for layer, near in enumerate(windows))
    return every if fits else None


def told(has: Sequence[bool]) -> int | list[int]:
    """The same, or for other patterns 1 for each layer that has something and 0 for the others."""
    every = every_nth_full(has)
    return list(map(int, has)) if every is None else every


def every_nth_behind(has: Sequence[int]) -> tuple[int, int] | None:
    """(n, k) if every n-th layer has something, but none of the first k; None for other patterns.

    Args:
        has: 1 for each layer that has it, one at least, and 0 for the others.
    """
    numbers = range(len(has))
    for every in range(1, len(has) + 1):
        for first in (0, list(has).index(1)):
            if list(has) == [int(i >= first and i % every == 0) for i in numbers]:
                return every, first
    return None
