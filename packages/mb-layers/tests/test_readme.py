"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def test_examples_run(capsys) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    names: dict = {}
    for code in blocks:
        exec(code, names)
        if "aux_loss, metrics = layer(x)" in code:
            assert sum(names["metrics"]["tokens_per_expert"].tolist()) == 4 * 32 * 2
            assert all(torch.isfinite(p.grad).all() for p in names["layer"].parameters())
        if "update_balancing_bias(" in code:
            assert names["layer"].router.balancing_bias.abs().max() > 5e-4
    printed = capsys.readouterr().out
    assert printed.startswith("[")
    assert printed.endswith("0.0 118\ntorch.Size([1])\n")
    assert names["layer"].experts.w1.requires_grad  # merged
