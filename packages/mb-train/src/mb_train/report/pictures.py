"""`mb-train report`: the picture and the page of one run or several, where they are asked for.

matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mb_train.folder.run_folder import PAGE, PICTURE
from mb_train.folder.whole_files import replaced
from mb_train.report.curves import Curves, read_curves, summary
from mb_train.report.page import write_page
from mb_train.report.panels import figure_of, panels_of
from mb_train.words import spelled


def draw(folder: Path) -> Path:
    """Draw RUN/loss.png from RUN/log.jsonl; returns its path.

    Raises:
        ValueError: no log, or an empty one.
        ModuleNotFoundError: matplotlib is missing.
    """
    path = folder / PICTURE
    draw_picture([read_curves(folder)], path)
    return path


def report(folders: Sequence[Path], output: Path | None = None) -> tuple[str, Path, Path]:
    """Draw the picture and write the page of one run, or of several side by side.

    Args:
        output: folder for both; that of the run by default, for several runs the current one.

    Returns:
        What came out of them in words; the picture; the page.

    Raises:
        ValueError: a folder without a log, or with an empty one; a place that cannot be written.
    """
    runs = [read_curves(folder) for folder in folders]
    _tell_apart(runs, folders)
    alone = len(runs) == 1
    where = output or (folders[0] if alone else Path("."))
    picture = where / (PICTURE if alone else "comparison.png")
    page = where / (PAGE if alone else "comparison.html")
    try:
        where.mkdir(parents=True, exist_ok=True)
        draw_picture(runs, picture)
        write_page(runs, page)
    except OSError as error:  # as a rule the run is another user's
        raise ValueError(
            f"Cannot write the report into {where}: {error.strerror or error}. Name a folder of "
            "your own with --output."
        ) from error
    text = []
    for curves in runs:
        text += [] if alone else [f"{curves.name}:"]
        text += [f"{'' if alone else '  '}{name}: {value}" for name, value in summary(curves)]
    return "\n".join(text), picture, page


def draw_picture(runs: Sequence[Curves], path: Path) -> None:
    """One PNG with a panel for each thing there is to see."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    panels = panels_of(runs)
    figure = figure_of(panels, runs, 2.9 * len(panels))
    FigureCanvasAgg(figure)
    with replaced(path) as draft:
        figure.savefig(draft, dpi=120, format="png")


def _tell_apart(runs: Sequence[Curves], folders: Sequence[Path]) -> None:
    """Runs of the same name go by their path."""
    names = [curves.name for curves in runs]
    for curves, folder in zip(runs, folders, strict=True):
        if names.count(curves.name) > 1:
            curves.name = spelled(str(folder))
