"""Experts of transformers with gates of their own: recognised, fused, equal to their eager path."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import mb_layers.transformers as mb  # noqa: E402
from mb_layers.transformers import experts  # noqa: E402
from mb_layers.transformers.experts import fused_activation, recognise_gate  # noqa: E402
from tiny_models import build, outputs_and_gradients  # noqa: E402

OAI = "swiglu(alpha=1.702, limit=7.0, offset=1)"
# All of transformers' classes whose gate, layout or norm is not the common one.
OWN = {
    ("aria", "AriaExperts"): "swiglu",
    ("beam", "BeamExperts"): "swiglu",
    ("deepseek_v4", "DeepseekV4Experts"): "swiglu(limit=10.0)",
    ("glm5_next", "Glm5NextTextExperts"): "swiglu(limit=10.0)",
    ("gpt_oss", "GptOssExperts"): OAI.replace(")", ", interleaved)"),
    ("hy_v4", "HYV4Experts"): "swiglu(limit=10.0)",
    ("hy_v4_vl", "HYV4VLExperts"): "swiglu(limit=10.0)",
    ("inkling2", "Inkling2Experts"): "swiglu(gate_cap=4.0, up_cap=25.0)",
    ("inkling2_loop", "Inkling2LoopExperts"): "swiglu(gate_cap=4.0, up_cap=25.0)",
    ("minimax_m3_vl", "MiniMaxM3VLExperts"): OAI,
    ("muse_spark", "MuseSparkExperts"): None,  # a norm behind each expert
    ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"): OAI,
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/parts.py, which builds any class of experts alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("parts")


def compare(parts: Any, module: nn.Module, config: Any) -> None:
    """Ours with transformers' eager path, the gates' numbers well within what the gates see."""
    with torch.no_grad():
        module.gate_up_proj.mul_(6)
    x = torch.randn(23, parts.width(module))
    ids = torch.rand(23, module.num_experts).argsort(dim=1)[:, :2]
    weights = torch.rand(23, 2)
    expected = parts.results(module, x, ids, weights)
    config._experts_implementation = mb.IMPLEMENTATION
    got = parts.results(module, x, ids, weights)
    errors = parts.largest(got, expected)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("model", "name"), OWN)
def test_every_gate_of_its_own(parts: Any, model: str, name: str) -> None:
    pytest.importorskip(f"transformers.models.{model}")  # some came with 5.24
    module, config = parts.build(model, name)
    recognise_gate(module)
    assert fused_activation(module) == OWN[model, name]
    compare(parts, module, config)


@pytest.mark.parametrize("where", ["class", "module"])
def test_a_gate_that_does_otherwise_than_its_numbers_say_goes_step_by_step(
    parts: Any, where: str
) -> None:
    module, config = parts.build("deepseek_v4", "DeepseekV4Experts")

    def softer(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit - 1)

    recognise_gate(module)
    assert fused_activation(module) == "swiglu(limit=10.0)"
    if where == "class":
        module.__class__ = type("Softer", (type(module),), {"_apply_gate": softer})
    else:
        module._apply_gate = functools.partial(softer, module)
    recognise_gate(module)
    assert fused_activation(module) is None
    compare(parts, module, config)


@pytest.mark.parametrize(
    ("model", "name", "numbers", "activation"),
    [
        ("gpt_oss", "GptOssExperts", {"limit": float("inf")}, "swiglu(alpha=1.702, offset=1, i"),
        ("gpt_oss", "GptOssExperts", {"alpha": -1.0}, None),
        ("deepseek_v4", "DeepseekV4Experts", {"limit": float("inf")}, "swiglu"),
        ("deepseek_v4", "DeepseekV4Experts", {"limit": 0}, None),
    ],
)
def test_numbers_that_no_activation_has_go_step_by_step(
    parts: Any, model: str, name: str, numbers: dict[str, float], activation: str | None
) -> None:
    module, config = parts.build(model, name)
    for number, value in numbers.items():
        setattr(module, number, value)
    recognise_gate(module)
    assert (fused_activation(module) or "none").startswith(activation or "none")
    compare(parts, module, config)


def test_gates_are_recognised_whatever_torchs_default_was_at_the_import(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = parts.build("inkling2", "Inkling2Experts")
    monkeypatch.setattr(experts.ExpertsInterface, "register", lambda *_: None)
    spec = importlib.util.spec_from_file_location("imported_anew", str(experts.__file__))
    assert spec is not None
    anew: Any = importlib.util.module_from_spec(spec)
    torch.set_default_dtype(torch.bfloat16)
    try:
        spec.loader.exec_module(anew)
    finally:
        torch.set_default_dtype(torch.float32)
    anew.recognise_gate(module)
    assert fused_activation(module) == OWN["inkling2", "Inkling2Experts"]


def test_numbers_are_read_anew(parts: Any) -> None:
    module, config = parts.build("minimax_m3_vl", "MiniMaxM3VLExperts")
    module.swiglu_limit, module.swiglu_alpha = 3.25, 1.0
    recognise_gate(module)
    assert fused_activation(module) == "swiglu(alpha=1.0, limit=3.25, offset=1)"
    compare(parts, module, config)


def test_a_gate_with_parameters_goes_step_by_step(parts: Any) -> None:
    module, _ = parts.build("deepseek_v4", "DeepseekV4Experts")
    module.slope = nn.Parameter(torch.tensor(1.0))
    recognise_gate(module)
    assert fused_activation(module) is None


@pytest.mark.parametrize(
    ("limit", "activation"),
    [
        (2.5, "swiglu(alpha=1.25, limit=2.5, offset=1)"),
        (float("inf"), "swiglu(alpha=1.25, offset=1)"),
    ],
)
def test_swapped_blocks_take_any_numbers(limit: float, activation: str) -> None:
    model = build("gpt_oss", swiglu_limit=limit, swiglu_alpha=1.25)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate_up_proj"):
                weight.mul_(8)
    expected = outputs_and_gradients(model)
    swapped = copy.deepcopy(model)
    layers = mb.swap_blocks(swapped, load_balancing_loss_weight=0.0)
    assert {moe.config.activation for moe in layers.values()} == {activation}
    logits = outputs_and_gradients(swapped)["logits"]
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5)
    mb.restore_blocks(swapped)
    for name, tensor in model.state_dict().items():
        assert torch.equal(swapped.state_dict()[name], tensor), name
