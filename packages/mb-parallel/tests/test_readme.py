"""The README's example and the example of a test run as printed."""

import importlib.util
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


def test_example_of_a_test():
    spec = importlib.util.spec_from_file_location(
        "test_my_model", PACKAGE / "examples/test_my_model.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.test_experts_on_two_ranks_give_the_same_output()
