"""Numbers beside an axis, as one writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axis import Axis


def written(value: float) -> str:
    """0.95, 2 or 5,000, where matplotlib writes 9e-01, 2 and 5e+03 beside one axis.

    What would not fit between the axis and its name is 2e6.
    """
    if 1000 <= value < 100_000:
        return f"{value:,.0f}"
    digits, e, exponent = f"{value:.4g}".partition("e")
    return f"{digits}{e}{int(exponent)}" if e else digits


def number_logarithmic(axis: Axis) -> None:
    """Number a logarithmic axis; between powers of ten only where there are few of these."""
    from matplotlib.ticker import LogFormatter

    class Written(LogFormatter):  # which chooses the ticks that get a number
        def __call__(self, x: float, pos: int | None = None) -> str:
            return written(x) if super().__call__(x, pos) else ""

    axis.set_major_formatter(Written())
    axis.set_minor_formatter(Written(minor_thresholds=(2, 0.5)))
