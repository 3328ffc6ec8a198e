"""The benchmark of training runs a step: what it builds is what `train_step` reads."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32}


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_training", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def two_steps(step, tokens: int) -> dict[str, int]:
        step()
        step()
        return {"tokens": tokens}

    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "S", 16)
    monkeypatch.setattr(module, "time_steps", two_steps)
    return module


@pytest.mark.parametrize("name", ["dense-125m", "dmoe-125m", "gpt-oss-20b"])
def test_a_step_is_timed(name: str, benchmark: ModuleType) -> None:
    change = TINY | {"seq_length": 16, "max_position_embeddings": 16}
    if name != "dense-125m":
        change["moe_num_experts"] = 4
    if name == "gpt-oss-20b":
        change["num_query_groups"] = 2
    measured = benchmark.ours(2, compiled=False, passes=2, name=name, **change)
    assert measured["tokens"] == 4 * 16
    assert "experts" in measured["chosen"] or name == "dense-125m"
