"""A report as one HTML page that needs nothing else: tables, and the panels as vector graphics."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mb_train.folder.whole_files import write_text
from mb_train.report.curves import Curves, settings, summary
from mb_train.report.panels import Panel, figure_of, panels_of

_PAGE_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>mb-train report</title><style>
body { font-family: system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem 1rem .15rem 0; }
td { border-top: 1px solid #ddd; } figure { margin: 1.5rem 0; } svg { width: 100%; height: auto; }
</style></head><body>"""
_GROUP = re.compile('<g id="[^"]*"')


def write_page(runs: Sequence[Curves], path: Path) -> None:
    """One HTML file: what came out, the panels as vector graphics, the configurations."""
    parts = [_PAGE_HEAD, f"<h1>{html.escape(', '.join(c.name for c in runs))}</h1>"]
    parts.append(_table(["", *(c.name for c in runs)], _summary_rows(runs)))
    parts += [f"<figure>{_svg(panel, runs)}</figure>" for panel in panels_of(runs)]
    heading = "Configuration" if len(runs) == 1 else "Configuration, where it differs"
    parts.append(f"<h2>{heading}</h2>")
    parts.append(_table(["", *(c.name for c in runs)], _config_rows(runs)))
    parts.append("</body></html>\n")
    write_text(path, "\n".join(parts))


def _svg(panel: tuple[str, Panel], runs: Sequence[Curves]) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure = figure_of([panel], runs, 3.0)
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    # Text stays text (to search and copy), and the same run gives the same page. A page has every
    # id once: what pictures refer to is named by their titles, of their groups nothing is needed.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"mb-train {panel[0]}"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    found = buffer.getvalue()
    return _GROUP.sub("<g", found[found.index("<svg") :])


def _summary_rows(runs: Sequence[Curves]) -> list[list[str]]:
    found = [dict(summary(curves)) for curves in runs]
    names = dict.fromkeys(name for one in found for name in one)
    return [[name, *(one.get(name, "") for one in found)] for name in names]


def _config_rows(runs: Sequence[Curves]) -> list[list[str]]:
    about = ("device", "ranks", "torch", "parameters")
    found = [{name: c.start.get(name) for name in about} | settings(c.start) for c in runs]
    names = dict.fromkeys(name for one in found for name in one)
    rows = [[name, *(_shown(one.get(name)) for one in found)] for name in names]
    if len(runs) == 1:
        return [row for row in rows if row[1]]
    return [row for row in rows if len(set(row[1:])) > 1]


def _shown(value: Any) -> str:
    return "" if value is None else f"{value}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])
