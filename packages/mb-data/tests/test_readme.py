"""The example on page one runs."""

import re
from pathlib import Path


def test_readme_example(tmp_path, monkeypatch, capsys):
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(readme), "exec"), {})
    assert "documents" in capsys.readouterr().out
