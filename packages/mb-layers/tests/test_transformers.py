"""transformers' models on our experts, their blocks as dMoE, against their eager path."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
import torch
from layers_oracle import assert_close

pytest.importorskip("transformers")

import mb_layers.transformers as mb
from mb_layers.state_dicts import Rule, translate
from mb_layers.transformers import experts
from tiny_models import BLOCKS, FAMILIES, build, moe_block, outputs_and_gradients

GPT_OSS = "swiglu(alpha=1.702, limit=7.0, offset=1, interleaved)"


def test_import_star_does_not_hide_the_real_transformers() -> None:
    names: dict[str, object] = {}
    exec("from mb_layers import *", names)
    assert "dMoE" in names
    assert "transformers" not in names


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_implementation_equals_eager(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    expected = outputs_and_gradients(model)
    calls = []
    fused = experts.fused_activation
    monkeypatch.setattr(experts, "fused_activation", lambda e: calls.append(fused(e)) or calls[-1])
    moved = mb.use(model)
    assert moved
    assert all("experts" in name for name in moved)
    got = outputs_and_gradients(model)
    assert calls, "our implementation did not run"
    others = {"gpt_oss": GPT_OSS, "gemma_gate": "geglu_tanh"}
    others |= dict.fromkeys(("nemotron_h", "nemotron_3"), "squared_relu")
    assert set(calls) == {others.get(family, "swiglu")}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("path", ["fused", "steps"])
def test_experts_with_biases_and_a_gate_of_their_own_keep_x_and_pre_activations(path: str) -> None:
    module = build("gpt_oss").model.layers[0].mlp.experts
    if path == "fused":
        experts.recognise_gate(module)
    assert (experts.fused_activation(module) is None) == (path == "steps")
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    x, tokens = torch.randn(500, 32, requires_grad=True), 500
    ids = torch.rand(tokens, 4).topk(2).indices
    weights = torch.rand(tokens, 2, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = mb.experts_forward(module, x, ids, weights)
    assert y.requires_grad
    hidden, ffn, top_k = 32, 32, 2
    theory = 4 * (hidden + 2 * ffn * top_k)  # x and the pre-activations of gate and up, in fp32
    indices = 4 * 3 * top_k + 200 / tokens  # order, inverse and weights; the counts
    assert sum(kept.values()) / tokens <= theory + indices


def test_expert_parallel_sentinels_add_nothing() -> None:
    """Under expert parallelism transformers marks foreign slots with id E and weight 0."""
    module = build("mixtral").model.layers[0].mlp.experts
    x = torch.randn(6, 32, requires_grad=True)
    ids = torch.tensor([[0, 1], [5, 2], [5, 5], [3, 5], [4, 0], [1, 5]])
    weights = torch.rand(6, 2) * (ids < 5)
    y = mb.experts_forward(module, x, ids, weights)
    expected = module(x, ids.clamp(max=4), weights)
    assert_close("y", y, expected)
    assert not y[2].any()


@pytest.mark.parametrize("family", BLOCKS)
def test_block_equals_dmoe(family: str) -> None:
    block = moe_block(build(family))
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
    grads = {n: torch.zeros_like(t) for n, t in block.state_dict().items()}  # of a bias, say
    grads |= {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
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


def test_one_tensor_per_expert_without_a_gate_loads_too() -> None:
    block = moe_block(build("nemotron_3"))
    layer = mb.moe_from_block(block)
    hub = {n: t for n, t in block.state_dict().items() if not n.startswith("experts.")}
    for name in ("up_proj", "down_proj"):
        weights = getattr(block.experts, name).unbind()
        hub |= {f"experts.{e}.{name}.weight": w for e, w in enumerate(weights)}
    state = mb.translate_block(hub, layer.config)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(state[name], tensor), name
    back = mb.translate_layer(state, layer.config, hub.keys())
    assert all(torch.equal(back[name], tensor) for name, tensor in hub.items())


def test_every_tensor_is_accounted_for() -> None:
    block = build("qwen2_moe").model.layers[0].mlp
    config = mb.config_from_block(block)
    state = dict(block.state_dict())
    state["experts.extra"] = state.pop("experts.down_proj")
    with pytest.raises(ValueError, match="exactly once") as error:
        mb.translate_block(state, config)
    assert "missing from the source: experts.down_proj" in str(error.value)
    assert "nothing uses: experts.extra" in str(error.value)
    rules = [Rule("a", ("x",)), Rule("a", ("x",))]
    with pytest.raises(ValueError, match=r"(?s)used more than once: x.*filled more than once: a"):
        translate({"x": torch.zeros(1)}, rules, ["a"])
    narrow = {k: v for k, v in block.state_dict().items() if "shared" not in k}
    with pytest.raises(ValueError, match=r"shared_expert\.down_proj\.weight"):
        mb.translate_block(narrow, config)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("mb_layers.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'mb-layers\[transformers\]'"):
        importlib.import_module("mb_layers.transformers")


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"transformers\.use\(model\) runs the experts of others"):
        mb.moe_from_block(torch.nn.Linear(2, 2))
    block = build("mixtral").model.layers[0].mlp
    block.experts.config.router_jitter_noise = 0.1
    with pytest.raises(ValueError, match=r"router_jitter_noise=0, got 0\.1"):
        mb.moe_from_block(block)
    with pytest.raises(ValueError, match=r"moe_norm_min of at most 1e-12, got 0\.5"):
        mb.swap_blocks(build("ernie4_5_moe", moe_norm_min=0.5))
    with pytest.raises(ValueError, match=r"an activation that dMoE computes, got Tanh\(\)"):
        mb.swap_blocks(build("nemotron_h", mlp_hidden_act="tanh"))
    with pytest.raises(ValueError, match=r"nothing uses: fc1_latent_proj\.bias"):
        mb.swap_blocks(build("nemotron_3", mlp_bias=True))
    with pytest.raises(ValueError, match="a shared expert of some width, got one of 0"):
        mb.swap_blocks(build("glm4_moe", n_shared_experts=0))


@pytest.mark.parametrize(
    ("family", "overrides", "expected", "got"),
    [
        ("olmoe", {"num_experts": 3}, "router.weight of shape (3, 32)", "(6, 32)"),
        ("olmoe", {"hidden_size": 16}, "router.weight of shape (6, 16)", "(6, 32)"),
        ("qwen2_moe", {"ffn_hidden_size": 8}, "experts.w1 of shape (6, 16, 32)", "(6, 32, 32)"),
        ("gpt_oss", {"activation": "gelu"}, "experts.w1 of shape (4, 32, 32)", "(4, 64, 32)"),
    ],
)
def test_overrides_of_sizes_are_refused(
    family: str, overrides: dict, expected: str, got: str
) -> None:
    words = re.escape(f"expected {expected} by the config, got {got} of the block; leave out")
    with pytest.raises(ValueError, match=words):
        mb.moe_from_block(moe_block(build(family)), **overrides)


def lone_block(name: str, config: str, **also: object) -> torch.nn.Module:
    """A block without a model, no number of it zero; `config` is where its config's class lies."""
    module, kind = config.rsplit(".", 1)
    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 4, "num_hidden_layers": 1}
    folder = f"transformers.models.{module}"
    made = getattr(importlib.import_module(f"{folder}.configuration_{module}"), kind)
    settings = made(**(sizes | also))
    settings._experts_implementation = "eager"
    block = getattr(importlib.import_module(f"{folder}.modeling_{module}"), name)(settings)
    for tensor in block.state_dict().values():
        tensor.normal_(std=0.5)
    return block


AXK2 = ("AXK2MoE", "axk2.AXK2Config")
GLM5_NEXT = ("Glm5NextTextMoE", "glm5_next.Glm5NextTextConfig")
MINIMAX_M3 = ("MiniMaxM3VLSparseMoeBlock", "minimax_m3_vl.MiniMaxM3VLTextConfig")
MISTRAL = ("MistralLarge4TextMoE", "mistral_large4.MistralLarge4TextConfig")


def test_weights_that_a_class_always_norms_are_normed_whatever_its_config_says() -> None:
    block = lone_block(*MISTRAL, norm_topk_prob=False)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(mb.moe_from_block(block)(x).y, block(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (GLM5_NEXT, {"n_group": 1, "topk_group": 1}),
        (
            MINIMAX_M3,
            {"intermediate_size": 8, "shared_intermediate_size": 12, "num_local_experts": 6},
        ),
    ],
    ids=["glm5_next", "minimax_m3"],
)
def test_gates_with_a_limit_of_all_experts_are_those_of_dmoe(
    names: tuple[str, str], sizes: dict[str, int]
) -> None:
    block = lone_block(*names, **sizes, swiglu_limit=0.7)
    layer, x = mb.moe_from_block(block), torch.randn(2, 9, 16)
    torch.testing.assert_close(layer(x).y, block(x), rtol=1e-4, atol=1e-4)
    back = mb.translate_layer(layer.state_dict(), layer.config, block.state_dict())
    assert all(torch.equal(back[name], tensor) for name, tensor in block.state_dict().items())


def test_a_shared_expert_without_a_gate_is_added_whole() -> None:
    """Lara Mini's block is Qwen3-Next's but for that gate."""
    pytest.importorskip("transformers.models.lara_mini")  # of transformers 5.24
    block = lone_block("LaraMiniSparseMoeBlock", "lara_mini.LaraMiniConfig", num_experts=8)
    layer, x = mb.moe_from_block(block), torch.randn(2, 9, 16)
    torch.testing.assert_close(layer(x).y, block(x), rtol=1e-4, atol=1e-4)


def test_a_shared_expert_with_another_gate_is_refused() -> None:
    block = lone_block(*GLM5_NEXT, n_group=1, topk_group=1, hidden_act="gelu")
    with pytest.raises(ValueError, match="got swiglu and, of the shared one, geglu"):
        mb.moe_from_block(block)


def test_groups_that_are_closed_in_other_ways_are_refused() -> None:
    """A.X-K2's closed groups keep a score of 0, better than an open one that a bias took below."""
    open_to_all = lone_block(*AXK2)
    x = torch.randn(2, 9, 16)
    layer = mb.moe_from_block(open_to_all)
    torch.testing.assert_close(layer(x).y, open_to_all(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="expected n_group=None, got 4"):
        mb.moe_from_block(lone_block(*AXK2, n_group=4, topk_group=2))
    with pytest.raises(ValueError, match="top_k_groups to be an integer >= 1, got 0"):
        mb.moe_from_block(lone_block(*GLM5_NEXT, n_group=1, topk_group=0))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_compile_without_graph_breaks(family: str) -> None:
    model = build(family)
    model.set_experts_implementation("mb")
    module = next(m for m in model.modules() if hasattr(m, "has_gate"))
    x = torch.randn(12, 32, requires_grad=True)
    ids, weights = torch.randint(4, (12, 2)), torch.rand(12, 2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for run in (module, compiled):
        y = run(x, ids, weights)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, module.down_proj))))
    for expected, got in zip(*results, strict=True):
        assert_close(family, got, expected)
    torch._dynamo.reset()
