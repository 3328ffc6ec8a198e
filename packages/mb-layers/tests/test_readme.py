"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def test_example_runs(capsys) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names: dict = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert sum(names["metrics"]["tokens_per_expert"].tolist()) == 4 * 32 * 2
    assert printed.startswith("[")
    assert all(torch.isfinite(p.grad).all() for p in names["layer"].parameters())
