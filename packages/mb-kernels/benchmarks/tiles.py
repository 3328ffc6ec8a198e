"""Tries other tiles for this GPU's matrix kernels, one field changed at a time.

    python packages/mb-kernels/benchmarks/run.py tiles [--quick]

For a chip whose entries in `mb_kernels.targets.TILES` are not measured, start here: put the fastest
tiles into the table, with their times. A tile that does not compile or fit is listed with the
reason. All are compiled first, by as many processes as there are cores; --quick takes one shape.
"""

import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from kernels import Kernel, kernels
from layer import SHAPES
from mb_kernels.targets import TILES, Tile
from timing import in_turns, median

# The Gluon kernels are written for their number of warps, rows and columns.
_HOPPER = [tiles["sm90"] for op, tiles in TILES.items() if op.endswith("_hopper")]
_FREE_IN_HOPPER = ("block_k", "num_stages", "group_m")


def neighbours(tile: Tile) -> dict[str, Tile]:
    """Tiles that differ from ``tile`` in one field, by what differs."""
    changes = {
        "block_m": [m for m in (tile.block_m // 2, tile.block_m * 2) if 64 <= m <= 256],
        "block_n": [n for n in (tile.block_n // 2, tile.block_n * 2) if 64 <= n <= 256],
        "block_k": [k for k in (tile.block_k // 2, tile.block_k * 2) if 32 <= k <= 128],
        "num_warps": [w for w in (4, 8) if w != tile.num_warps],
        "num_stages": [s for s in (tile.num_stages - 1, tile.num_stages + 1) if s > 1],
        "group_m": [g for g in (tile.group_m // 2, tile.group_m * 2, tile.group_m * 4) if g],
        "programs_per_unit": [p for p in (1, 2) if p != tile.programs_per_unit],
        "flatten": [not tile.flatten],
    }
    return {
        f"{field} {value}": replace(tile, **{field: value})
        for field, values in changes.items()
        if tile not in _HOPPER or field in _FREE_IN_HOPPER
        for value in values
    }


def candidates(kernel: Kernel) -> dict[str, Tile]:
    assert kernel.tile is not None
    return {"as in the table": kernel.tile, **neighbours(kernel.tile)}


def compile_share(shape: str, share: Sequence[tuple[str, Tile]]) -> None:
    """Compile kernels by launching them; on few tokens, for which the same is compiled."""
    found = kernels(replace(SHAPES[shape], tokens=1024))
    for what, tile in share:
        try:
            found[what].launch(tile)
        except Exception:
            continue  # reported when it is timed


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    workers = min(os.cpu_count() or 1, 12)
    spawn = multiprocessing.get_context("spawn")
    for shape in [*SHAPES][:1] if quick else [name for name in SHAPES if not name.endswith("-8k")]:
        found = {what: k for what, k in kernels(SHAPES[shape]).items() if k.tile is not None}
        todo = [(what, t) for what, kernel in found.items() for t in candidates(kernel).values()]
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            shares = [pool.submit(compile_share, shape, todo[i::workers]) for i in range(workers)]
            for share in shares:
                share.result()
        for what, kernel in found.items():
            yield _measure(kernel, {"benchmark": "tiles", "shape": shape, "what": what})
        del found
        torch.cuda.empty_cache()


def _measure(kernel: Kernel, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The candidates of one kernel, in turns."""
    calls, failed = {}, []
    for change, tile in candidates(kernel).items():
        try:
            kernel.launch(tile)
            torch.cuda.synchronize()
        except Exception as failure:
            if tile is kernel.tile:
                raise  # the table itself is wrong
            failed.append({**row, "tile": change, "failed": type(failure).__name__})
            continue
        calls[change] = functools.partial(kernel.launch, tile)
    times = {change: median(values) for change, values in in_turns(calls, seconds=2).items()}
    base = times["as in the table"]
    return [
        *({**row, "tile": change, "ms": f"{ms:.4g}", "of_table": round(ms / base, 3)}
          for change, ms in times.items()),
        *failed,
    ]  # fmt: skip
