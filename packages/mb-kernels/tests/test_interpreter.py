"""Runs tests/interpreter in a process of its own, with Triton's interpreter switched on.

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
# What an op refuses before it is dispatched, and what is asked of a GPU.
NOT_OF_KERNELS = "is_an_error or on_a_gpu"


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted(cases):
    """All files in one process, for each would import torch and Triton again."""
    files = [*map(str, sorted(HERE.glob("test_every_op*.py"))), str(HERE / "interpreter")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q"]
    command += ["-m", cases, "-k", f"not ({NOT_OF_KERNELS})", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-1000:]
