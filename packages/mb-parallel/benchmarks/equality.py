"""The equality matrix: the largest relative deviation of each layout from one process.

    python packages/mb-parallel/benchmarks/equality.py [layout ...]

Five steps of accumulation, clipping and AdamW in fp32 on gloo, up to eight processes; the layouts
are those of tests/test_layouts.py, which holds all of this to 1e-5.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    from test_layouts import LAYOUTS, deviations, run_all

    layouts = sys.argv[1:] or list(LAYOUTS)
    results, rows = run_all(layouts, steps=5), []
    for layout in layouts:
        zero = LAYOUTS[layout].zero_stage
        rows.append({"layout": layout, "zero": zero, **deviations(results, layout)})
        if len(rows) == 1:
            print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
        cells = [f"{v:.1e}" if isinstance(v, float) else str(v) for v in rows[-1].values()]
        print("| " + " | ".join(cells) + " |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
