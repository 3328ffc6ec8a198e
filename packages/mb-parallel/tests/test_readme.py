"""The README's example runs as printed; the example of a test is collected with the tests."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_readme_example(capsys):
    (example,) = re.findall(
        r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), flags=re.DOTALL
    )
    exec(compile(example, "README.md", "exec"), {})
    chosen, norm = capsys.readouterr().out.splitlines()
    assert chosen.startswith("expert parallelism: ep = 1")
    assert norm.startswith("gradient norm ")
