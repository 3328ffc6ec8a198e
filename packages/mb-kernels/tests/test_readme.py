"""The pages: the example runs, tables name what there is, and the picture is of this source."""

import pathlib
import re
import runpy

import mb_kernels

TESTS = pathlib.Path(__file__).parent
README = (TESTS.parent / "README.md").read_text()


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


def test_the_tree_names_every_room_and_module():
    """But for an op, its twin and its kernels, which every room has."""
    (tree,) = re.findall(r"```text\nmb_kernels/\n(.*?)```", README, flags=re.DOTALL)
    source = pathlib.Path(mb_kernels.__file__).parent
    there = {path.name for path in source.iterdir() if any(path.glob("*.py"))}
    there |= {path.stem for path in source.rglob("*.py")} - {"__init__", "__main__", "op"}
    missing = there - set(re.findall(r"\w+", tree))
    assert {name for name in missing if not name.endswith(("kernels", "reference"))} == set()


def test_each_fault_names_tests_that_there_are():
    page = (TESTS.parent / "docs/faults.md").read_text()
    rows = re.findall(r"^\| (?!fault|gap)[^|]+\|(.*)\|$", page, flags=re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, name in named:
            assert f"\ndef {name}(" in (TESTS / file).read_text() or not name, f"{file}::{name}"


def test_the_picture_of_the_rooms_shows_their_imports():
    picture = runpy.run_path(str(TESTS.parents[2] / "tools/rooms.py"))
    drawn = picture["draw"]() == picture["PICTURE"].read_text()
    assert drawn, "an import has changed: python3 tools/rooms.py draws it anew"
