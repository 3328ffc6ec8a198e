"""Fixtures of mb-layers' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240607)
