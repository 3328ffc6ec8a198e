"""The README: its example runs, and its table names what the package exports."""

import pathlib
import re

import mb_kernels

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert sum(map(int, re.findall(r"\d+", capsys.readouterr().out.split("]")[0]))) == 64


def test_table_names_every_op():
    table = re.findall(r"^\| (`.*?) \|", README, flags=re.MULTILINE)
    named = {name for row in table for name in re.findall(r"`(\w+)", row)}
    exported = {name for name in vars(mb_kernels) if name in mb_kernels.reference.__all__}
    assert exported <= named
    assert all(hasattr(mb_kernels, name) for name in named)
