"""What benchmarks call is called once, on small tensors: a GPU is too dear to find it broken."""

import importlib
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def optimizer(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    module = importlib.import_module("optimizer")
    monkeypatch.delitem(importlib.sys.modules, "optimizer")
    for name, value in {"HIDDEN": 8, "FFN": 4, "EXPERTS": 2, "VOCABULARY": 12}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


@pytest.mark.parametrize(
    "steps", ["with_fp32_moments", "with_bf16_moments", "all_but_masters_in_bf16", "muons"]
)
def test_every_step_moves_the_weights(optimizer, monkeypatch, steps):
    made, make = [], optimizer.make
    monkeypatch.setattr(optimizer, "make", lambda *given: made.extend(make(*given)) or made)
    calls = getattr(optimizer, steps)(1)
    assert len(made) == len(optimizer.shapes(1))
    for name, (call, _) in calls.items():
        before = [parameter.detach().clone() for parameter in made]
        for _ in range(1 if made[0].dtype is torch.float32 else 200):  # bf16 moves by its last bit
            call()
        same = [n for n, (p, b) in enumerate(zip(made, before, strict=True)) if torch.equal(p, b)]
        assert not same, (name, same)
