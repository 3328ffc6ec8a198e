"""The benchmark of training runs a step: what it builds is what `train_step` reads.

And what is no case of another is said before anything is measured.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 32}


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    module = program("run")

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


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("bert-110m:1", "the recipe of a GPT, which writes texts, got bert-110m, a bert"),
        ("dmoe-46m:0", "RECIPE:PROMPTS"),
        ("dmoe-46m", "RECIPE:PROMPTS"),
        ("gpt5:1", "RECIPE:PROMPTS"),
    ],
)
def test_what_writes_no_text_is_not_timed(case: str, says: str, monkeypatch, capsys) -> None:
    generate = program("generate")
    monkeypatch.setattr(sys, "argv", ["generate.py", "--cases", "dmoe-46m:1", case])
    with pytest.raises(SystemExit):
        generate.main()
    assert says in capsys.readouterr().err
