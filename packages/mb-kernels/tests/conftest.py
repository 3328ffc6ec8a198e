"""Makes Triton's interpreter faster, and right in bf16, where it runs: see test_interpreter.py."""

import os
import sys
from pathlib import Path

import pytest
import torch
from mb_kernels.testing import bf16_interpreted, interpreted_quickly

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def quick_and_right_in_bf16():
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    with bf16_interpreted(), interpreted_quickly():
        yield


@pytest.fixture
def poisoned_memory():
    """torch.empty returns NaN, so that an element no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
