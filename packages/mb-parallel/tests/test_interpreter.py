"""Runs tests/interpreter in a process of its own, with Triton's interpreter switched on.

The switch is an environment variable that Triton reads when it is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
FILES = sorted((pathlib.Path(__file__).parent / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interpreted(file, cases):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q"]
    command += ["-m", cases, str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
