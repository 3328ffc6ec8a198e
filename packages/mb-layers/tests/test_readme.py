"""The README's examples run as they stand, and what it counts are as many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


def test_families_and_blocks_are_as_many_as_the_pages_say() -> None:
    pytest.importorskip("transformers")
    from mb_layers.transformers.block_routing import BLOCKS

    package = Path(__file__).parents[1]
    readme = (package / "README.md").read_text()
    page = (package / "docs/transformers.md").read_text()
    figures = r"^\| \w+ \| ([\d.e-]+\+?\d*) \| ([\d.e-]+) \| (?:fused|steps) \| (?:same|-) \|"
    rows = re.findall(figures, page, flags=re.MULTILINE)
    assert f"[{len(rows)} model families]" in readme
    said = re.search(r"logits agree within (\S+) and gradients within (\S+) \(mostly", readme)
    assert said is not None
    for figures, most in zip(zip(*rows, strict=True), said.groups(), strict=True):
        assert max(map(float, figures)) <= float(most)
    assert f"It knows {len(BLOCKS)} classes of blocks" in readme
    assert f"the {len(BLOCKS)} classes of blocks" in page
