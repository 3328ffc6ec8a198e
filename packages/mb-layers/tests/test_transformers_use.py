"""`use`: models whose stacked experts lack transformers' hook, and models without experts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import mb_kernels  # noqa: E402
import mb_layers.transformers as mb  # noqa: E402
from mb_layers import freeze_in_bits  # noqa: E402
from mb_layers.frozen import FrozenWeight  # noqa: E402
from mb_layers.transformers.experts import activation_name  # noqa: E402
from tiny_models import build, llama4, longcat, outputs_and_gradients  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

run = mb_kernels.expert_mlp


def dbrx(top_k: int) -> torch.nn.Module:
    config = transformers.DbrxConfig(
        d_model=32,
        n_heads=2,
        n_layers=2,
        max_seq_len=64,
        vocab_size=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={
            "ffn_hidden_size": 16,
            "moe_num_experts": 4,
            "moe_top_k": top_k,
            "hidden_size": 32,
        },
        initializer_range=0.2,
    )
    return transformers.DbrxForCausalLM(config)


def phimoe(top_k: int) -> torch.nn.Module:
    config = transformers.PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=top_k,
    )
    return transformers.PhimoeForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "top_k"),  # transformers' own LongCat does not run with 1
    [(llama4, 1), (llama4, 2), (dbrx, 1), (dbrx, 2), (longcat, 2), (longcat, 4)],
)
def test_experts_without_the_hook_equal_eager(make, top_k: int) -> None:
    model = make(top_k).float()
    expected = outputs_and_gradients(model)
    twin = copy.deepcopy(model)
    moved = mb.use(twin)
    assert len(moved) == (1 if make is longcat else 2)
    assert mb.use(twin) == moved
    got = outputs_and_gradients(pickle.loads(pickle.dumps(copy.deepcopy(twin))))
    assert list(twin.state_dict()) == list(model.state_dict())
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    compared = [name for name in expected if "experts" in name]
    assert all(expected[name].abs().max() > 1e-5 for name in compared)


@pytest.mark.parametrize("make", [llama4, dbrx, phimoe])
def test_models_of_other_blocks_are_not_swapped_but_used(make) -> None:
    """transformers' own switch moves nothing of the first two, and says nothing."""
    model = make(2)
    (block,) = {type(m) for m in model.modules() if hasattr(m, "router") and hasattr(m, "experts")}
    with pytest.raises(ValueError, match=r"found none; mb_layers\.transformers\.use\(model\)"):
        mb.swap_blocks(model)
    some = next(module for module in model.modules() if type(module) is block)
    with pytest.raises(ValueError, match=rf"got {block.__name__}; mb_layers.*\.use\(model\) runs"):
        mb.moe_from_block(some)
    assert len(mb.use(model)) == 2


def test_use_names_what_it_moved() -> None:
    assert mb.use(build("mixtral")) == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]


def test_llama4_runs_with_adapters_and_whole_copies_of_its_experts() -> None:
    """PEFT wraps the experts, which the block calls; `use` names them, and not their block."""
    peft = pytest.importorskip("peft")
    model = llama4(2).float()
    names = [f"model.layers.{i}.feed_forward.experts" for i in (0, 1)]
    assert mb.use(copy.deepcopy(model)) == names
    adapted = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    for options in (adapted, {"modules_to_save": ["experts"]}):
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        wrapped = peft.get_peft_model(copy.deepcopy(model), config)
        expected = outputs_and_gradients(wrapped)
        mb.use(wrapped)
        got = outputs_and_gradients(wrapped)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
        assert any("experts" in name for name in expected)


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "8-bit"])
@pytest.mark.parametrize("make", [llama4, longcat])
def test_experts_without_the_hook_keep_no_merged_or_decoded_copy(make, bits: int | None) -> None:
    peft = pytest.importorskip("peft")
    model = make(2).float()
    names = ("gate_up_proj", "down_proj")
    moved = [model.get_submodule(name) for name in mb.use(copy.deepcopy(model))]
    if bits is not None:
        for experts in moved:
            freeze_in_bits(experts, bits, names=names)
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=[f"experts.{name}" for name in names],
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config)
    expected = outputs_and_gradients(adapted)
    mb.use(adapted)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = (tensor.dtype, tensor.shape[1:])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        got = outputs_and_gradients(adapted)
    for weight in (p for p in adapted.parameters() if not isinstance(p, FrozenWeight)):
        kept.pop(weight.untyped_storage().data_ptr(), None)
    shapes = {getattr(experts, name).shape[1:] for experts in moved for name in names}
    assert not {(torch.float32, shape) for shape in shapes}.intersection(kept.values())
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    assert any("experts" in name for name in expected)


def test_use_raises_where_there_is_nothing_to_move() -> None:
    with pytest.raises(ValueError, match=r"an experts_implementation in transformers, found none$"):
        mb.use(torch.nn.Linear(2, 2))
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=2, num_experts=2
    )
    with pytest.raises(ValueError, match="SwitchTransformersExperts have no such hook"):
        mb.use(transformers.SwitchTransformersForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("act_fn", "name"),
    [
        (torch.nn.functional.silu, "silu"),
        (torch.nn.functional.gelu, "gelu"),
        (torch.nn.functional.relu, "relu"),
        (ACT2FN["silu"], "silu"),
        (ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (torch.nn.SiLU(), "silu"),
        (torch.nn.ReLU(), "relu"),
        (torch.nn.GELU(), "gelu"),
        (torch.nn.GELU("tanh"), "gelu_tanh"),
        (ACT2FN["quick_gelu"], None),
        (torch.tanh, None),
    ],
)
def test_activations_are_recognised(act_fn: object, name: str | None) -> None:
    assert activation_name(act_fn) == name


def test_use_moves_experts_inside_any_module() -> None:
    model = build("mixtral")
    expected = outputs_and_gradients(model)
    inside = torch.nn.ModuleDict({"policy": model})
    assert mb.use(inside) == [f"policy.model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert model.config._experts_implementation == "mb"
    for name, tensor in outputs_and_gradients(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_quantised_experts_are_refused_and_the_model_is_left() -> None:
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
    loaded = replace_with_fp8_linear(build("qwen3_moe"), ["lm_head"], config)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.experts' .* FP8Experts in .*float8"):
        mb.use(loaded)
    with pytest.raises(ValueError, match=r"'Qwen3MoeSparseMoeBlock' .* FP8Experts in .*float8"):
        mb.swap_blocks(loaded)
    assert loaded.config._experts_implementation != "mb"
    sequential = llama4(1)
    for layer in sequential.model.layers:
        layer.feed_forward.experts = torch.nn.ModuleList([torch.nn.Linear(32, 16)])
    with pytest.raises(
        ValueError, match="feed_forward' stacked in 16 bits or more, got ModuleList"
    ):
        mb.use(sequential)


@pytest.mark.parametrize("make", [llama4, dbrx, longcat])
def test_use_moves_experts_that_fully_shard_has_made_a_subclass_of(make, monkeypatch) -> None:
    model = make(2).float()
    expected = outputs_and_gradients(model)
    names = mb.use(copy.deepcopy(model))
    for experts in map(model.get_submodule, names):
        kind = type(experts)
        experts.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    assert mb.use(model) == names
    seen = []
    monkeypatch.setattr(mb_kernels, "expert_mlp", lambda *a, **k: seen.append(1) or run(*a, **k))
    for name, tensor in outputs_and_gradients(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    assert len(seen) == len(names)
    assert mb.use(model) == names


@pytest.mark.parametrize("make", [llama4, dbrx])
def test_use_moves_what_a_device_map_has_hooked(make, monkeypatch) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = make(2).float()
    expected = outputs_and_gradients(model)
    for part in model.modules():  # as from_pretrained does for several devices
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("cpu", io_same_device=True))
    mb.use(model)
    seen = []
    monkeypatch.setattr(mb_kernels, "expert_mlp", lambda *a, **k: seen.append(1) or run(*a, **k))
    for name, tensor in outputs_and_gradients(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    assert len(seen) == 2


def test_weights_that_come_and_go_are_refused_where_nobody_would_fetch_them() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    for model, move in ((llama4(1), mb.use), (build("mixtral"), mb.swap_blocks)):
        part = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
        hooks.add_hook_to_module(part, hooks.AlignDevicesHook("cpu", offload=True))
        with pytest.raises(ValueError, match="got some accelerate has offloaded"):
            move(model)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_model_is_offloaded_by_the_names_of_its_modules(to: str, tmp_path: Path) -> None:
    """Which are those of the state dict, but not of swapped blocks."""
    accelerate = pytest.importorskip("accelerate")
    model, tokens = build("qwen2_moe").eval(), torch.randint(3, 64, (2, 7))
    swapped, named = copy.deepcopy(model), copy.deepcopy(model)
    mb.use(model)
    for one in (swapped, named):
        mb.swap_blocks(one)
    tensors = [*named.named_parameters(), *named.named_buffers()]
    by_name = {name: tensor.detach() for name, tensor in tensors}
    expected = model(tokens).logits
    if to == "disk":
        accelerate.utils.offload_state_dict(tmp_path / "named", by_name)
    for kind, one in (("used", model), ("swapped", swapped), ("named", named)):
        if to == "disk":
            accelerate.disk_offload(one, tmp_path / kind, torch.device("cpu"))
        else:
            accelerate.cpu_offload(one, state_dict=by_name if one is named else None)
    for one in (model, named):
        torch.testing.assert_close(one(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="by the names of its parameters"):
        swapped(tokens)
