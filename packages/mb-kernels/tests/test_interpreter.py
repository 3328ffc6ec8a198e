"""Runs tests/interpreter in processes of their own, with Triton's interpreter switched on.

The switch is an environment variable that Triton reads when it is imported, so it must not reach
the other tests, which run the reference on CPU tensors.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
HERE = pathlib.Path(__file__).parent
FILES = [HERE / "test_every_op.py", *sorted((HERE / "interpreter").glob("test_*.py"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interpreted(file):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
