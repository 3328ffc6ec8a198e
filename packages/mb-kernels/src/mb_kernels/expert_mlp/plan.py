"""The kernels and tiles for an expert MLP of given sizes, and whether tokens are copied to rows.

Letters: N rows, E experts.
"""

import functools
from dataclasses import dataclass, replace

from mb_kernels.activation import Activation, parse
from mb_kernels.grouped_gemm.kernels import rows_tile
from mb_kernels.runtime.plan import Plan
from mb_kernels.targets.table import DECODED_ROWS, Tile


@dataclass(frozen=True)
class ExpertPlan:
    """The activation, tiles of the products, ``in_rows`` and ``float8``.

    ``in_rows``: tokens are copied to their rows first, and the up-projection reads rows; else it
    gathers tokens. ``up`` is its tile, whose height is that of the row tiles that forward and
    backward share. ``float8``: products of rows and weights are products of 8-bit codes.
    """

    activation: Activation
    up: Tile
    down: Tile
    dact: Tile
    dx: Tile
    in_rows: bool
    float8: bool


@functools.lru_cache(maxsize=1024)
def expert_plan(
    plan: Plan, activation: str, rows: int, experts: int, *, keep_rows: bool, fp8: bool = False
) -> ExpertPlan:
    """The plan for ``rows`` rows; ``keep_rows``: the backward gets the copy of tokens in rows."""
    parsed = parse(activation)
    plan = replace(plan, dtype=plan.codes) if fp8 else plan
    kind = "_glu" if parsed.gated else ""
    up = "up_hopper" if plan.specialized else f"up{kind}"
    decode = f"up{kind}_decode"
    in_rows = keep_rows or plan.specialized or plan.float8
    if rows <= DECODED_ROWS * experts and not (keep_rows or plan.float8) and plan.has(decode):
        up, in_rows = decode, False
    return ExpertPlan(
        activation=parsed,
        up=plan.tile(up),
        down=rows_tile(plan, rows, experts, transpose_weight=True),
        dact=plan.tile("dact_hopper" if plan.specialized else f"dact{kind}"),
        dx=rows_tile(plan, rows, experts, transpose_weight=False),
        in_rows=in_rows,
        float8=plan.float8,
    )
