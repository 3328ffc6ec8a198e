"""`mb-train report RUN`: draws the curves of runs, or the frontier of many."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mb_train.flags.parser import Parser, named
from mb_train.untrusted import printable
from mb_train.words import missing_package


def report(parser: Parser, arguments: Sequence[str]) -> int:
    """Draw the curves of one run or several."""
    parser.add_argument(
        "run", nargs="+", type=named, help="run folder; several are drawn side by side"
    )
    parser.add_argument(
        "--output", type=named, help="folder for picture and page; default the run's"
    )
    parser.add_argument(
        "--frontier", action="store_true",
        help="loss against training time of finished runs, a curve for each family; "
        "picture and numbers go to --output, default the current folder",
    )  # fmt: skip
    options = parser.parse_intermixed_args(arguments)
    if find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "to draw with", "matplotlib")
    each: dict[Path, Path] = {}
    for run in map(Path, options.run):
        each.setdefault(run.resolve(), run)
    runs = list(each.values())
    output = None if options.output is None else Path(options.output)
    if options.frontier:
        from mb_train.report.frontier_report import report_frontier

        text, picture, numbers = report_frontier(runs, output or Path())
        print(printable(f"{text}\npicture: {picture}\nnumbers: {numbers}"))
        return 0
    from mb_train.report.pictures import report

    text, picture, page = report(runs, output)
    print(printable(f"{text}\npicture: {picture}\npage: {page}"))
    return 0
