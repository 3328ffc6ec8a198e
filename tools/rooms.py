"""Draws the rooms of mb-kernels and who imports whom, from the imports in the source.

    python3 tools/rooms.py    # writes packages/mb-kernels/docs/rooms.svg; a test compares the two

Rooms stand in rows. An import must lead to a lower row: one that leads back has no picture. What
every op stands on is one box at the bottom, and of the arrows only those are drawn that do not
follow from others.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages/mb-kernels/src/mb_kernels"
PICTURE = ROOT / "packages/mb-kernels/docs/rooms.svg"

# Rows of rooms, the upper ones first: columns of a room, from and to.
ROWS: list[dict[str, tuple[int, int]]] = [
    {"warm_up": (3, 10)},
    {"block_sparse": (4, 5)},
    {"expert_mlp": (4, 8)},
    {
        name: (column, column)
        for column, name in enumerate(
            (
                *("adamw", "sum_of_squares", "symmetric_matmul", "exchange", "elementwise"),
                *("grouped_gemm", "permute", "float8", "quantize", "routing", "router_losses"),
                *("linear_cross_entropy", "relative_attention", "state_space", "muon"),
                "accumulate_grad",
            )
        )
    },
    {"language": (0, 4), "recomputing": (5, 5), "runtime": (6, 15)},
    {
        **{"activation": (0, 1), "derivatives": (2, 2), "exporting": (3, 4)},
        **{"uncompiled": (5, 6), "bins": (7, 8), "chunks": (9, 10), "targets": (11, 15)},
    },
]
BELOW = {name for row in ROWS[4:] for name in row}
# They import every room, and no room imports them: their arrows would hide all others.
NOT_DRAWN = {"__init__", "reference", "testing"}
OF_THE_GATE = ("cases", "command", "cover", "gate", "ledger", "record", "__main__")
NOT_DRAWN |= {f"targets.{module}" for module in OF_THE_GATE}

COLUMN, ROW, HEIGHT, LEFT, TOP = 90, 92, 56, 14, 14
PLAIN, WITH_LANGUAGE, STAND = "#d9e8fb", "#eee0f6", "#f4f4f4"


def room(module: str) -> str:
    """The room of a module, by its name within mb_kernels."""
    return module if module in NOT_DRAWN else module.split(".")[0]


def imports() -> dict[str, set[str]]:
    """Rooms that each room imports, wherever in its files."""
    found: dict[str, set[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        here = room(".".join(file.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            modules = [name.split(".")[1:] for name in names if name.startswith("mb_kernels.")]
            rooms = {room(".".join(module[:2])) for module in modules}
            found.setdefault(here, set()).update(rooms - {here})
    return found


def checked() -> dict[str, set[str]]:
    """``imports`` of the rooms that are drawn.

    Raises:
        ValueError: a room without a place in ROWS, or an import that does not lead down.
    """
    rows = {name: i for i, row in enumerate(ROWS) for name in row}
    graph = {name: others for name, others in imports().items() if name not in NOT_DRAWN}
    if graph.keys() != rows.keys():
        raise ValueError(f"ROWS: expected all rooms; differ in {graph.keys() ^ rows.keys()}.")
    for name, others in graph.items():
        for other in others:
            if other in NOT_DRAWN or rows[other] <= rows[name]:
                raise ValueError(f"{name} imports {other}, which is not below it.")
    return graph


def arrows(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""

    def reaches(name: str, other: str) -> bool:
        return other in graph[name] or any(reaches(n, other) for n in graph[name])

    return sorted(
        (name, other)
        for name, others in graph.items()
        for other in others
        if not any(reaches(n, other) for n in others - {other})
    )


def draw() -> str:
    """The picture, as SVG."""
    graph = checked()
    boxes = {
        name: (LEFT + first * COLUMN, TOP + i * ROW, (last - first + 1) * COLUMN - 10)
        for i, row in enumerate(ROWS)
        for name, (first, last) in row.items()
    }
    columns = 1 + max(last for row in ROWS for _, last in row.values())
    width, base = 2 * LEFT + columns * COLUMN - 10, TOP + 4 * ROW
    height = base + 2 * ROW + 14
    line = 'stroke="#555" stroke-width="1.3" fill="none" marker-end="url(#tip)"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" font-family="system-ui, sans-serif">',
        "<title>The rooms of mb-kernels; an arrow is an import</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
        f'<rect x="6" y="{base - 14}" width="{width - 12}" height="{2 * ROW}" rx="8" '
        f'fill="{STAND}" stroke="#aaa"/>',
    ]
    lines = {}  # one to all that is below
    for name, other in arrows(graph):
        (x, y, w), (to_x, to_y, to_w) = boxes[name], boxes[other]
        if other in BELOW and name not in BELOW:
            to_y = base - 14
        # Straight down from the middle of the narrower box.
        at = x + w / 2 if w <= to_w else to_x + to_w / 2
        if (name, other) == ("warm_up", "expert_mlp"):  # beside block_sparse
            at += COLUMN
        lines[f'<path d="M{at:g} {y + HEIGHT}V{to_y - 2}" {line}/>'] = None
    parts += lines
    for name, (x, y, w) in boxes.items():
        fill = WITH_LANGUAGE if "language" in graph[name] | {name} else PLAIN
        parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{HEIGHT}" rx="6" fill="{fill}" '
            'stroke="#555"/>'
        )
        words = name.split("_") if w < 100 else [name]
        for i, word in enumerate(words):
            down = y + HEIGHT / 2 + 4 + 15 * (i - (len(words) - 1) / 2)
            word += "_" if i < len(words) - 1 else ""
            parts.append(
                f'<text x="{x + w / 2:g}" y="{down:g}" text-anchor="middle" font-size="12.5" '
                f'fill="#222">{word}</text>'
            )
    for i, text in enumerate(
        (
            "An arrow is an import; nothing points back.",
            "Lilac: with device code from language.",
            "Not drawn: reference, testing and the gate",
            "in targets, which import every room.",
        )
    ):
        parts.append(
            f'<text x="{LEFT}" y="{TOP + 12 + 18 * i}" font-size="12" fill="#666">{text}</text>'
        )
    return "\n  ".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
