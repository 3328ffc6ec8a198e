"""The examples run as they stand and do what they say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import mb_kernels
import pytest
import torch

GPT_OSS = "transformers' GPT-OSS"
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["run.py", "host.py", "qwen3.py", "families.py"])
def test_benchmarks_run_tiny_on_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name not in ("run.py", "host.py"):
        pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", [name, "--smoke"])
    runpy.run_path(str(EXAMPLES.parent / "benchmarks" / name))["main"]()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == {"families.py": 5, "host.py": 6}.get(name, 2)
    if name == "host.py":  # whose ops computed nothing
        assert mb_kernels.bin_tokens(torch.tensor([[1], [0]]), 2).order_N.tolist() == [1, 0]
    if name == "qwen3.py":  # two experts implementations, one model
        assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-5)
    if name == "families.py":
        families = ["olmoe", "gpt_oss", "lfm2_moe", "cohere2_moe", "laguna"]
        assert [row["family"] for row in rows] == families
        assert max(row[what] for row in rows for what in ("logits", "gradients", "swap")) < 1e-5
        assert all(row["round trip"] for row in rows)


def test_blocks_without_a_model_are_dmoe_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of models with images, whose text part has groups, or no shared expert, or softmax."""
    pytest.importorskip("transformers")
    benchmarks = EXAMPLES.parent / "benchmarks"
    monkeypatch.setattr("sys.argv", ["parts.py", "--smoke"])
    monkeypatch.syspath_prepend(str(benchmarks))
    runpy.run_path(str(benchmarks / "parts.py"))["main"]()
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["rows"]
    kinds = {(row["model"], row.get("groups")) for row in rows}
    assert kinds == {
        ("gemma4", None),
        *(("mistral4", groups) for groups in (1, 4)),
        *(("mimo_v2_flash", groups) for groups in (1, 4)),
        ("qwen3_vl_moe", 1),
    }
    assert max(row[what] for row in rows for what in ("output", "gradients")) < 1e-5, printed


def test_memory_by_option_is_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", ["memory.py", "--smoke"])
    runpy.run_path(str(EXAMPLES.parent / "benchmarks" / "memory.py"))["main"]()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    bytes_of = {row["option"]: row["bytes per token"] for row in printed["rows"]}
    page = (EXAMPLES.parent / "docs" / "memory.md").read_text("utf-8")
    said = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", page, flags=re.MULTILINE))
    assert said.keys() == bytes_of.keys()
    for option, bytes_said in said.items():  # which are of more tokens, who share the offsets
        assert 0 <= bytes_of[option] - int(bytes_said) <= 8, option
    theory = 2 * 512 + 4 * 192 * 8  # x, and the pre-activations of K gated experts
    for option in ("dMoE", "mask", "mlp_bias", "LoRA, rank 16", "LoRA over 4 bits", GPT_OSS):
        assert bytes_of[option] < 1.05 * theory, option
    assert bytes_of["recompute"] < bytes_of["saved_activation_bits=4"] < bytes_of["dMoE"]
    for row in printed["errors"]:
        near_a_jump = row["activation"] == "swiglu(limit=1)"
        assert row["dx, 8 bits"] < (0.1 if near_a_jump else 0.01)
        assert row["dx, 4 bits"] < (0.4 if near_a_jump else 0.2)
