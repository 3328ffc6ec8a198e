"""Modules of the package import each other one way: no circle hides the order of things."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import mb_data
import pytest
from mb_data.chat import template
from mb_data.text import compression, parquet, sources
from mb_data.text.sentences import SentenceSplitter

ROOT = Path(mb_data.__file__).parent


def imported(path):
    """Modules of this package that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_circles():
    modules = {
        ".".join(("mb_data", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
    }
    packages = {name for name in modules if name.endswith(".__init__")}
    graph = {
        name: {other for other in imported(path) if other in modules and other != name}
        for name, path in modules.items()
        if name not in packages
    }
    assert len(graph) > 30
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_a_worker_imports_nothing():
    """What a forked worker imports, every worker does, while its parent waits."""
    code = """
import sys
import numpy as np
from mb_data import load_tokenizer
from mb_data.text import encode, pipeline, reading
tokenizer = load_tokenizer("gpt2")
tokenizer.prepare()
before = {*sys.modules}
line = sys.argv[1].encode()
job = encode.Job(tokenizer, ("text",), True, None, np.dtype("uint16"), 1 << 20)
_, result = encode.encode_block(job, reading.Block("in.jsonl", 0, len(line), line, 0))
assert result.careful == 1 and result.documents == 1 and not result.errors, result
print(*{*sys.modules} - before)
"""
    line = json.dumps({"text": "cafe\u0301 \u1e9e, and letters new to Unicode: \U0001cc00 \u0897"})
    command = [sys.executable, "-c", code, line]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize(
    ("lacks", "extra", "use"),
    [
        ("pyarrow", "parquet", lambda: parquet._open("a")),
        ("fsspec", "remote", lambda: sources._filesystem("a")),
        ("jinja2", "chat", lambda: template._jinja2("a")),
        ("sentencex", "sentences", SentenceSplitter._segment),
        (None, "zstd", lambda: compression._zstd("a")),
    ],
)
def test_who_lacks_a_package_is_told_its_extra(monkeypatch, lacks, extra, use):
    lacks = lacks or ("compression" if sys.version_info >= (3, 14) else "backports") + ".zstd"
    monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'mb-data\[{extra}\]'") as told:
        use()
    assert told.value.name == lacks
