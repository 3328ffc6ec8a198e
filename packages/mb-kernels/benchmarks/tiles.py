"""Other tiles for this GPU's matrix kernels, beside the table's: one field changed at a time.

    python packages/mb-kernels/benchmarks/run.py tiles [--quick]

Where `mb_kernels.targets.TILES` has an entry that nobody has measured, start here: put what is
fastest into the table, with its times. A tile that does not compile or fit is listed with the
reason. All are compiled first, by as many processes as there are cores; --quick takes one shape.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from kernels import Kernel, kernels, median_ms
from layer import SHAPES
from mb_kernels.targets import TILES, Tile

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


def candidates(found: dict[str, Kernel]) -> Iterator[tuple[str, str, Tile]]:
    for what, kernel in found.items():
        if kernel.tile is not None:
            yield what, "as in the table", kernel.tile
            for change, tile in neighbours(kernel.tile).items():
                yield what, change, tile


def compile_share(shape: str, worker: int, workers: int) -> None:
    """Compile every workers-th candidate by launching it; on few tokens, which compile the same."""
    found = kernels(replace(SHAPES[shape], tokens=1024))
    for what, _, tile in list(candidates(found))[worker::workers]:
        try:
            found[what].launch(tile)
        except Exception:
            continue  # reported when it is timed


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    workers = min(os.cpu_count() or 1, 12)
    spawn = multiprocessing.get_context("spawn")
    for shape in ["olmoe"] if quick else [name for name in SHAPES if not name.endswith("-8k")]:
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            for share in [pool.submit(compile_share, shape, i, workers) for i in range(workers)]:
                share.result()
        found = kernels(SHAPES[shape])
        base = 0.0
        table = []
        for what, change, tile in candidates(found):
            row = {"benchmark": "tiles", "shape": shape, "what": what, "tile": change}
            try:
                ms = median_ms(found[what], tile)
            except Exception as failure:
                if tile is found[what].tile:
                    raise  # the table itself is wrong
                table.append({**row, "failed": type(failure).__name__})
                continue
            base = ms if tile is found[what].tile else base
            table.append({**row, "ms": round(ms, 4), "of_table": round(ms / base, 3)})
        yield table
        torch.cuda.empty_cache()
