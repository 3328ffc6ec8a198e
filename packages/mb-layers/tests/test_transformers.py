"""transformers' models on our experts, their blocks as dMoE, against their eager path."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
from layers_oracle import assert_close

transformers = pytest.importorskip("transformers")

import mb_layers.transformers as mb  # noqa: E402
from mb_layers import MoEConfig  # noqa: E402

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "head_dim": 16,
    },
    "deepseek_v3": {
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    # Beyond the five: experts without a gate, and a gate that is not SiLU.
    "nemotron_h": {
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "layers_block_type": ["attention", "moe"],
        "mlp_hidden_act": "relu2",
        "head_dim": 16,
    },
    "gemma_gate": {"intermediate_size": 16, "num_experts": 9, "hidden_act": "gelu_pytorch_tanh"},
}
BLOCKS = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3"]


def build(family: str) -> torch.nn.Module:
    kind = {"gemma_gate": "olmoe"}.get(family, family)
    config = transformers.AutoConfig.for_model(kind, **(COMMON | FAMILIES[family]))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # Zero-initialised in transformers; a test needs them to matter.
            if name.endswith(("e_score_correction_bias", "_bias", "router.bias", "gate.weight")):
                tensor.normal_(std=0.2)
    model.set_experts_implementation("eager")
    return model


def outputs_and_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    model.loss_function(logits, tokens, vocab_size=64).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | grads


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_implementation_equals_eager(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    expected = outputs_and_gradients(model)
    calls = []
    fused = mb._fused_activation
    monkeypatch.setattr(mb, "_fused_activation", lambda e: calls.append(fused(e)) or calls[-1])
    model.set_experts_implementation("mb")
    got = outputs_and_gradients(model)
    assert calls, "our implementation did not run"
    assert set(calls) == {
        {"gpt_oss": None, "nemotron_h": "squared_relu", "gemma_gate": "geglu_tanh"}.get(
            family, "swiglu"
        )
    }
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def test_expert_parallel_sentinels_add_nothing() -> None:
    """Under expert parallelism transformers marks foreign slots with id E and weight 0."""
    experts = build("mixtral").model.layers[0].mlp.experts
    x = torch.randn(6, 32, requires_grad=True)
    ids = torch.tensor([[0, 1], [5, 2], [5, 5], [3, 5], [4, 0], [1, 5]])
    weights = torch.rand(6, 2) * (ids < 5)
    y = mb.experts_forward(experts, x, ids, weights)
    expected = experts(x, ids.clamp(max=4), weights)
    assert_close("y", y, expected)
    assert not y[2].any()


@pytest.mark.parametrize("family", BLOCKS)
def test_block_equals_dmoe(family: str) -> None:
    block = build(family).model.layers[1].mlp
    layer = mb.moe_from_block(block)
    x = torch.randn(2, 9, 32)
    results = []
    for module in (block, layer):
        inputs = x.clone().requires_grad_()
        y = module(inputs)
        y = y if isinstance(y, torch.Tensor) else y[0]
        y.square().sum().backward()
        results.append((y.detach(), inputs.grad))
    for what, got, expected in zip(("y", "d x"), *reversed(results), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=what)
    grads = {n: p.grad for n, p in block.named_parameters()}
    if layer.config.balancing_bias:
        grads["gate.e_score_correction_bias"] = torch.zeros(layer.config.num_experts)
    renamed = mb.translate_block(grads, layer.config)
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, renamed[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_one_tensor_per_expert_loads_too(names: tuple[str, str, str]) -> None:
    block = build("mixtral").model.layers[0].mlp
    layer = mb.moe_from_block(block)
    hub = {"gate.weight": block.gate.weight}
    for e in range(5):
        gate, up = block.experts.gate_up_proj[e].chunk(2)
        for name, tensor in zip(names, (gate, up, block.experts.down_proj[e]), strict=True):
            hub[f"experts.{e}.{name}.weight"] = tensor
    state = mb.translate_block(hub, layer.config)
    assert state.keys() == layer.state_dict().keys()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_every_tensor_is_accounted_for() -> None:
    block = build("qwen2_moe").model.layers[0].mlp
    config = mb.config_from_block(block)
    state = dict(block.state_dict())
    state["experts.extra"] = state.pop("experts.down_proj")
    with pytest.raises(ValueError, match="exactly once") as error:
        mb.translate_block(state, config)
    assert "missing from the source: experts.down_proj" in str(error.value)
    assert "nothing uses: experts.extra" in str(error.value)
    narrow = {k: v for k, v in block.state_dict().items() if "shared" not in k}
    with pytest.raises(ValueError, match=r"shared_experts\.down_proj\.weight"):
        mb.translate_block(narrow, config)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "mb_layers.transformers")
    with pytest.raises(ImportError, match=r"pip install 'mb-layers\[transformers\]'"):
        importlib.import_module("mb_layers.transformers")


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r'set_experts_implementation\("mb"\)'):
        mb.moe_from_block(torch.nn.Linear(2, 2))
    block = build("mixtral").model.layers[0].mlp
    block.experts.config.router_jitter_noise = 0.1
    with pytest.raises(ValueError, match=r"router_jitter_noise=0, got 0\.1"):
        mb.moe_from_block(block)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_swapped_model_gives_the_same_logits_and_the_loss_of_its_routers(family: str) -> None:
    model = build(family)
    swapped = copy.deepcopy(model)
    layers = mb.swap_blocks(swapped, load_balancing_loss_weight=0.0)
    assert all(isinstance(layer.config, MoEConfig) for layer in layers.values())
    expected, got = outputs_and_gradients(model), outputs_and_gradients(swapped)
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    embedding = "model.embed_tokens.weight"
    torch.testing.assert_close(got[embedding], expected[embedding], rtol=1e-5, atol=1e-5)

    balanced = copy.deepcopy(model)
    layers = mb.swap_blocks(balanced, load_balancing_loss_weight=10.0)
    with_loss = outputs_and_gradients(balanced)
    name = next(n for n in with_loss if n.endswith("router.weight"))
    assert not torch.allclose(with_loss[name], got[name])
    balanced.eval()
    tokens = torch.randint(3, 64, (1, 5))
    assert torch.isfinite(balanced(input_ids=tokens).logits).all()


def test_swap_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="found none"):
        mb.swap_blocks(torch.nn.Linear(2, 2))
    model = build("olmoe")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=False"):
        mb.swap_blocks(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_compile_without_graph_breaks(family: str) -> None:
    model = build(family)
    model.set_experts_implementation("mb")
    experts = next(m for m in model.modules() if hasattr(m, "has_gate"))
    x = torch.randn(12, 32, requires_grad=True)
    ids, weights = torch.randint(4, (12, 2)), torch.rand(12, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    results = []
    for run in (experts, compiled):
        y = run(x, ids, weights)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, experts.down_proj))))
    for expected, got in zip(*results, strict=True):
        assert_close(family, got, expected)
    torch._dynamo.reset()
