"""The examples of docs/datasets.md run."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[1] / "docs" / "datasets.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["samples", "readers", "documents", "packing"])
def test_example(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(DOCUMENT), "exec"), {})
