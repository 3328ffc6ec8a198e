"""Adapters on stacked experts, saved for engines that know experts one by one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from mb_layers import MoEConfig, add_lora, dMoE
from torch import Tensor, nn

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

import mb_layers.transformers as mb  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny_models import build, llama4, longcat  # noqa: E402


class Expert(nn.Module):
    """One expert in modules of its own, as checkpoints on the Hub name it."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def by_expert(model: nn.Module) -> nn.Module:
    """The experts of a model, each by itself, under the same names."""
    twin = nn.Module()
    twin.config = {"model_type": "custom"}
    for n, layer in enumerate(model.model.layers):
        stacked = layer.mlp.experts
        pairs = zip(stacked.gate_up_proj.detach(), stacked.down_proj.detach(), strict=True)
        module = twin
        for part in ("model", "layers", str(n), "mlp"):
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.experts = nn.ModuleList(Expert(*pair) for pair in pairs)
    return twin


@pytest.mark.parametrize("by", ["add_lora", "target_parameters", "target_parameters, swapped"])
def test_saved_adapters_are_those_of_the_single_experts(by: str, tmp_path: Path) -> None:
    model = build("qwen3_moe").eval()
    twin = by_expert(model)
    if by == "add_lora":
        layers = mb.swap_blocks(model)
        for layer in layers.values():
            add_lora(layer.experts, rank=4, alpha=8.0)
            for name in ("w1", "w2"):
                layer.experts.parametrizations[name][0].b.data.normal_()
        weights = [(layer.experts.w1, layer.experts.w2) for layer in layers.values()]
    else:
        names = ["experts.gate_up_proj", "experts.down_proj"]
        if by == "target_parameters, swapped":
            mb.swap_blocks(model)
            names = ["experts.w1", "experts.w2"]
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj"],
            target_parameters=names,
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config)
    mb.save_adapters(model, tmp_path)
    loaded = peft.PeftModel(twin, peft.PeftConfig.from_pretrained(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert not peft.set_peft_model_state_dict(loaded, tensors).unexpected_keys
    if by != "add_lora":
        model = model.merge_and_unload()
        if by == "target_parameters, swapped":
            mb.restore_blocks(model)
        experts = [layer.mlp.experts for layer in model.model.layers]
        weights = [(each.gate_up_proj, each.down_proj) for each in experts]
    x = torch.randn(5, 32)
    for n, (gate_up, down) in enumerate(weights):
        for e in range(gate_up.shape[0]):
            expected = Expert(gate_up[e].detach(), down[e].detach())(x)
            got = loaded.get_submodule(f"base_model.model.model.layers.{n}.mlp.experts.{e}")(x)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["add_lora", "target_parameters"])
@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "hunyuan_v1_moe"])
def test_a_shared_experts_adapters_are_those_of_its_linears(family: str, by: str) -> None:
    original = build(family).eval()
    model = copy.deepcopy(original)
    layers = mb.swap_blocks(model)
    if by == "add_lora":
        for layer in layers.values():
            add_lora(layer.shared_expert, rank=4, alpha=8.0)
            for made in layer.shared_expert.parametrizations.values():
                made[0].b.data.normal_()
    else:
        config = peft.LoraConfig(
            r=4,
            target_modules=[],
            target_parameters=["shared_expert.w1", "shared_expert.w2"],
            init_lora_weights=False,
        )
        model = peft.get_peft_model(model, config)
    tensors, scaling = mb.adapters_by_expert(model)
    assert len(tensors) == len(layers) * 3 * 2
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        assert not torch.allclose(original(input_ids=tokens).logits, logits, atol=1e-2)
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                place = name.removesuffix(".lora_A.weight")
                weight = original.get_submodule(place.removeprefix("base_model.model.")).weight
                weight += scaling * tensors[f"{place}.lora_B.weight"] @ a
        got = original(input_ids=tokens).logits
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)


def test_experts_without_a_gate_have_two_projections(tmp_path: Path) -> None:
    config = MoEConfig(
        hidden_size=16, ffn_hidden_size=32, num_experts=3, top_k=1, activation="gelu"
    )
    model = nn.ModuleDict({"mlp": dMoE(config)})
    experts = model["mlp"].experts
    add_lora(experts, rank=2, alpha=8.0)
    mb.save_adapters(model, tmp_path, projections=("w1", "w3", "w2"))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for name, stacked in (("w3", "w1"), ("w2", "w2")):
        adapter = experts.parametrizations[stacked][0]
        for e in range(3):
            place = f"base_model.model.mlp.experts.{e}.{name}"
            assert torch.equal(saved.pop(f"{place}.lora_A.weight"), adapter.a[e])
            assert torch.equal(saved.pop(f"{place}.lora_B.weight"), adapter.b[e])
    assert not saved


def test_an_earlier_peft_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    model = peft.get_peft_model(build("olmoe"), config)
    monkeypatch.delattr(ParamWrapper, "get_delta_factors")
    with pytest.raises(ValueError, match=r"expected adapters of PEFT 0\.21 or later"):
        mb.adapters_by_expert(model)


def test_what_has_no_such_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one alpha / rank and one rank, got none"):
        mb.save_adapters(build("qwen3_moe"), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    model = build("olmoe")
    layers = list(mb.swap_blocks(model).values())
    for layer, alpha in zip(layers, (4.0, 8.0), strict=True):
        add_lora(layer.experts, rank=4, alpha=alpha)
    with pytest.raises(ValueError, match=r"got \[\(1.0, 4\), \(2.0, 4\)\]"):
        mb.adapters_by_expert(model)
    other = build("olmoe")
    for layer, rank in zip(mb.swap_blocks(other).values(), (4, 2), strict=True):
        add_lora(layer.experts, rank=rank, alpha=rank)
    with pytest.raises(ValueError, match=r"got \[\(1.0, 2\), \(1.0, 4\)\]"):
        mb.adapters_by_expert(other)
    add_lora(layers[0].experts, rank=2, alpha=2.0)
    with pytest.raises(ValueError, match=r"one adapter on model.layers.0.mlp.*w1, got 2"):
        mb.adapters_by_expert(model)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    with pytest.raises(ValueError, match=r"columns\], got .* of GptOssExperts"):
        mb.adapters_by_expert(peft.get_peft_model(build("gpt_oss"), config))
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    with pytest.raises(ValueError, match=r"columns\], got .* of Llama4TextExperts"):
        mb.adapters_by_expert(peft.get_peft_model(llama4(top_k=1), config))


def test_adapters_on_other_parameters_are_left_out() -> None:
    parameters = ["experts.down_proj", "gate.weight"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    model = peft.get_peft_model(build("qwen3_moe"), config)
    tensors, _ = mb.adapters_by_expert(model)
    assert {name.split(".experts.")[1].split(".")[1] for name in tensors} == {"down_proj"}
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="got default, other; choose one by set_adapter"):
        mb.adapters_by_expert(model)


def test_zero_experts_have_no_adapters() -> None:
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    tensors, _ = mb.adapters_by_expert(peft.get_peft_model(longcat(top_k=2), config))
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in tensors} == {0, 1, 2, 3}
