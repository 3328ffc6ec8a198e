"""The examples run as they stand and do what they say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, **arguments: int) -> list[float] | tuple[float, float]:
    return runpy.run_path(str(EXAMPLES / name))["main"](**arguments)


def test_gpt_learns() -> None:
    losses = run("gpt.py", steps=25)
    assert losses[0] > 3.5
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]


def test_upcycled_layer_starts_as_the_dense_one() -> None:
    difference, apart = run("upcycle.py")
    assert difference < 1e-6
    assert apart > 1e-5


def test_swapped_transformers_model_keeps_its_logits() -> None:
    pytest.importorskip("transformers")
    assert max(run("swap_transformers.py")) < 1e-5


@pytest.mark.parametrize("name", ["run.py", "qwen3.py"])
def test_benchmarks_run_tiny_on_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "qwen3.py":
        pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", [name, "--smoke"])
    runpy.run_path(str(EXAMPLES.parent / "benchmarks" / name))["main"]()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 2
    if name == "qwen3.py":  # two experts implementations, one model
        assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-5)
