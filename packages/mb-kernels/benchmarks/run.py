"""Runs benchmarks by name: a table, then one JSON line.

    python packages/mb-kernels/benchmarks/run.py [NAME ...] [--quick] [--shape dsv3 ...]

Every benchmark is a module beside this one with ``run(*, quick)``, which yields a table per shape,
a list of rows that are dicts; it is printed at once. Dated tables are kept in `results/`.
"""

import argparse
import importlib
import json
import pathlib
import sys
from typing import Any

import torch
import triton

BENCHMARKS = ("layer", "kernels", "host", "block_sparse")
ON_REQUEST = ("timeline", "energy", "tiles", "share", "contraction", "decode", "first_call",
              "state_space", "peers")  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "benchmark"))
    cells = [columns, *([str(row.get(key, "")) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"of {', '.join(BENCHMARKS)} (the default), {', '.join(ON_REQUEST)}"
    parser.add_argument("names", nargs="*", help=names)
    parser.add_argument("--quick", action="store_true", help="fewer baselines")
    parser.add_argument("--shape", action="append", help="of layer.SHAPES; default: all")
    arguments = parser.parse_args()
    known = (*BENCHMARKS, *ON_REQUEST)
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected {', '.join(known)}")
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    shapes = importlib.import_module("layer").SHAPES
    if set(arguments.shape or ()) - set(shapes):
        parser.error(f"--shape: expected of {', '.join(shapes)}; got {arguments.shape}")
    for name in set(shapes) - set(arguments.shape or shapes):
        del shapes[name]
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(*machine.values(), sep=", ")
    rows = []
    for name in arguments.names or BENCHMARKS:
        for found in importlib.import_module(name).run(quick=arguments.quick):
            print(table(found), flush=True)
            rows += found
    print(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
