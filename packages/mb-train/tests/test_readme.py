"""The README's example runs as printed."""

import re
from pathlib import Path


def test_readme_example(capsys, tmp_path, monkeypatch):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"loss 10\.\d\d -> \d+\.\d\d, kept in runs/quickstart/iter_0000004", last)
