"""What benchmarks call is called once, on small tensors: a GPU is too dear to find it broken."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from mb_parallel.optimizer.muon import coefficients_of

HERE = Path(__file__).parents[1] / "benchmarks"


def load(monkeypatch, name, **constants):
    monkeypatch.syspath_prepend(str(HERE))
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    for constant, value in {"DEVICE": "cpu", **constants}.items():
        monkeypatch.setattr(module, constant, value)
    return module


@pytest.fixture
def optimizer(monkeypatch):
    return load(monkeypatch, "optimizer", HIDDEN=8, FFN=4, EXPERTS=2, VOCABULARY=12)


@pytest.mark.parametrize("shape", [(2, 24, 8), (3, 8, 16)])
def test_both_iterations_are_near_the_exact_one(monkeypatch, shape):
    module = load(monkeypatch, "newton_schulz")
    torch.manual_seed(0)
    calls = module.calls_of(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(calls["symmetric"](), calls["bmm"]())
    torch.testing.assert_close(calls["ours"](), calls["plain"](), rtol=1e-3, atol=1e-4)
    for _, _, error, largest in module.deviations(12, 40, coefficients_of("quintic", 5)):
        assert error < 0.3
        assert 0.6 < largest < 1.3


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
