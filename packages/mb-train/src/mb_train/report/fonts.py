"""Fonts for the names of runs: matplotlib's own has no Chinese, Japanese or Korean letters."""

from __future__ import annotations

# Common ones that have, of Linux, Windows and macOS. Of a collection of fonts in one file
# matplotlib may see the first alone, which is Noto's JP; it has Chinese letters and Korean ones.
FURTHER = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback",
    "Microsoft YaHei", "SimHei", "Yu Gothic", "Malgun Gothic",
    "PingFang SC", "PingFang HK", "Hiragino Sans GB", "Heiti TC", "Arial Unicode MS",
)  # fmt: skip


def families() -> list[str]:
    """matplotlib's own, and behind it those that are there, which draw what it lacks."""
    from matplotlib import rcParams
    from matplotlib.font_manager import get_font_names

    there = set(get_font_names())
    return [*rcParams["font.family"], *(name for name in FURTHER if name in there)]
