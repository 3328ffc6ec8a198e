"""Adapters on experts: equal to the merged weights, and never merged on the way."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from pathlib import Path

import mb_kernels
import pytest
import torch
from layers_oracle import assert_close
from mb_layers import (
    Experts,
    FrozenWeight,
    MoEConfig,
    add_lora,
    dMoE,
    freeze_in_bits,
    merge_lora,
)
from mb_layers.factored import LoRA
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize


def build(dtype: torch.dtype = torch.float64, **overrides) -> dMoE:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 5, "top_k": 2}
    return dMoE(MoEConfig(**(sizes | {"init_method_std": 0.3} | overrides)), dtype=dtype)


def with_adapters(layer: dMoE, rank: int = 3, names: tuple[str, ...] = ("w1", "w2")) -> dMoE:
    add_lora(layer.experts, rank=rank, alpha=6.0, names=names)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith((".b", ".b1", ".b2")):
                p.normal_(std=0.3)
    return layer


def merged_twin(layer: dMoE) -> dMoE:
    """A layer with plain weights, their values functions of the adapters."""
    twin = build(
        layer.experts.w1.dtype,
        activation=layer.config.activation,
        mlp_bias=layer.config.mlp_bias,
    )
    twin.router, twin.experts.b1, twin.experts.b2 = (
        layer.router,
        layer.experts.b1,
        layer.experts.b2,
    )
    for name in ("w1", "w2"):
        delattr(twin.experts, name)
        setattr(twin.experts, name, getattr(layer.experts, name))
    return twin


@pytest.mark.parametrize(
    "overrides", [{}, {"activation": "gelu", "mlp_bias": True}, {"recompute": True}], ids=str
)
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_adapters_equal_merged_weights(overrides: dict, rank: int) -> None:
    layer = with_adapters(build(**overrides), rank)
    endings = (".a", ".b", ".b1", ".b2")
    adapters = {n: p for n, p in layer.named_parameters() if n.endswith(endings)}
    assert len(adapters) == (6 if layer.config.mlp_bias else 4)
    assert not any(p.requires_grad for n, p in layer.named_parameters() if "original" in n)
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    twin = merged_twin(layer)
    results = []
    for run in (layer, twin):
        y = run(x).y
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *adapters.values()))))
    for name, got, expected in zip(("y", "x", *adapters), *results, strict=True):
        assert_close(name, got, expected)


def test_weights_made_of_several_tensors_are_frozen_and_adapters_before_are_not() -> None:
    layer = build()
    for name in ("w1", "w2"):
        nn.utils.parametrizations.weight_norm(layer.experts, name)
    for _ in range(2):
        add_lora(layer.experts, rank=2, alpha=4.0)
    trained = {n for n, p in layer.experts.named_parameters() if p.requires_grad}
    parts = itertools.product(("w1", "w2"), (1, 2), "ab")
    assert trained == {f"parametrizations.{name}.{at}.{part}" for name, at, part in parts}


@pytest.mark.parametrize("rank", [3, 16])
def test_gradients_of_several_losses_at_once_are_those_of_each(rank: int) -> None:
    layer = with_adapters(build(), rank)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    losses = layer(x).y.sum(dim=1)
    at_once = torch.autograd.grad(
        losses, leaves, torch.eye(3).double(), is_grads_batched=True, retain_graph=True
    )
    for row, loss in enumerate(losses):
        by_itself = torch.autograd.grad(loss, leaves, retain_graph=True)
        for got, want in zip(at_once, by_itself, strict=True):
            assert want.abs().max() > 0
            assert_close("gradient", got[row], want)


def test_no_copy_of_the_weights_is_kept_or_made() -> None:
    layer = with_adapters(build(torch.float32, hidden_size=256, ffn_hidden_size=256), rank=4)
    x = torch.randn(4, 256)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x).y
    for p in layer.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < layer.experts.w2.numel() * 4
    y.sum().backward()


def test_merging_gives_plain_weights_with_the_same_output() -> None:
    layer = with_adapters(build())
    x = torch.randn(6, 32, dtype=torch.float64)
    expected = layer(x).y
    merge_lora(layer.experts)
    assert [name for name, _ in layer.experts.named_parameters()] == ["w1", "w2"]
    assert all(p.requires_grad for p in layer.experts.parameters())
    assert_close("y", layer(x).y, expected)


def test_merging_leaves_weights_without_adapters_to_their_optimizer() -> None:
    layer = build()
    add_lora(layer.experts, rank=4, alpha=6.0, names=("w1",))
    w2 = layer.experts.w2
    merge_lora(layer.experts)
    assert layer.experts.w2 is w2
    assert layer.experts.w1.requires_grad


def test_fresh_adapters_change_nothing_and_travel_with_the_state() -> None:
    layer = build()
    x = torch.randn(6, 32, dtype=torch.float64)
    before = layer(x).y
    add_lora(layer.experts, rank=4, alpha=6.0)
    assert_close("y", layer(x).y, before)
    trained = with_adapters(build(), rank=4)
    layer.load_state_dict(trained.state_dict())
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.experts.parametrizations.w1[0].b.zero_()
    assert_close("y", twin(x).y, trained(x).y)
    assert not torch.allclose(layer(x).y, trained(x).y)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (4, 0.3)])
def test_adapters_over_frozen_bits(bits: int, bound: float) -> None:
    layer = build()
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    exact = layer(x).y
    bytes_before = sum(t.nbytes for t in layer.experts.parameters())
    freeze_in_bits(layer.experts, bits)
    assert not any(weight.requires_grad for weight in layer.experts.parameters())
    parts = [(w.codes, w.scales) for w in (layer.experts.w1, layer.experts.w2)]
    assert sum(t.nbytes for pair in parts for t in pair) < bytes_before * (bits + 2) / 64
    assert (layer(x).y - exact).norm() < bound * exact.norm()
    layer = with_adapters(layer)
    adapters = {n: p for n, p in layer.named_parameters() if n.endswith((".a", ".b"))}
    twin = merged_twin(layer)
    results = []
    for run in (layer, twin):
        y = run(x).y
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *adapters.values()))))
    for name, got, expected in zip(("y", "x", *adapters), *results, strict=True):
        assert_close(name, got, expected)
    merge_lora(layer.experts)
    assert_close("merged", layer(x).y, results[0][0])
    assert isinstance(layer.experts.w1, nn.Parameter)


@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2")], ids=str)
def test_bf16_and_autocast(names) -> None:
    layer = with_adapters(build(torch.float32), names=names)
    x = torch.randn(9, 32)
    expected = layer(x).y
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x).y
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("x_scale", "grad_scale"), [(0.003, 1e-3), (10, 1e3)])
def test_fp16_gradients_of_the_router_hold_what_products_cannot(
    x_scale: float, grad_scale: float
) -> None:
    layer = with_adapters(build(torch.float16, activation="gelu", mlp_bias=True))
    x = (x_scale * torch.randn(9, 32)).half()
    dy = grad_scale * torch.randn(9, 32)
    routed: list[Tensor] = []
    layer.router.register_forward_hook(lambda *ran: routed.append(ran[2].weights_TK))
    grads = []
    for module in (layer, copy.deepcopy(layer).double()):
        dtype = module.experts.w1.dtype
        y = module(x.to(dtype)).y
        grads += torch.autograd.grad(y, routed.pop(), dy.to(dtype))
    assert (grads[0] - grads[1]).norm() < 2e-3 * grads[1].norm()


def test_what_needs_the_fused_op_is_refused() -> None:
    with pytest.raises(ValueError, match="saved_activation_bits=None for adapters"):
        add_lora(build(saved_activation_bits=8).experts, rank=2, alpha=1.0)
    with pytest.raises(ValueError, match="fp8=False for adapters"):
        add_lora(build(fp8=True).experts, rank=2, alpha=1.0)
    with pytest.raises(ValueError, match="fp8=False for weights in few bits"):
        freeze_in_bits(build(fp8=True).experts, 8)
    with pytest.raises(ValueError, match="rank to be an integer >= 1, got 0"):
        add_lora(build().experts, rank=0, alpha=1.0)
    with pytest.raises(ValueError, match=r"`layer.experts` with w1, w2, got dMoE; for"):
        add_lora(build(), rank=2, alpha=1.0)
    with pytest.raises(ValueError, match=r"names of weights, 'w1' and 'w2', got \('b1',\)"):
        add_lora(build(mlp_bias=True).experts, rank=2, alpha=1.0, names=("b1",))
    for names in ((), ("w1", "w1")):  # nothing would be trained, or one weight twice
        with pytest.raises(ValueError, match="tuple of names of weights, each once"):
            add_lora(build().experts, rank=2, alpha=1.0, names=names)
    with pytest.raises(ValueError, match=r"`layer.experts` with w1, w2, got Router; for"):
        merge_lora(build().router)


@pytest.mark.parametrize("by", ["parametrization", "few bits"])
def test_no_weight_in_parts_is_rounded_to_8_bit_floats(by: str) -> None:
    """Whoever puts it there: PEFT, say, or a block that was frozen before it was swapped."""
    layer = build(fp8=True)
    held = layer.experts.w2
    if by == "few bits":
        weight = nn.Parameter(FrozenWeight.of(held, 8), requires_grad=False)
        layer.experts.register_parameter("w2", weight)
    else:
        adapter = LoRA(held, rank=2, alpha=1.0)
        parametrize.register_parametrization(layer.experts, "w2", adapter, unsafe=True)
    x = torch.randn(5, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="fp8=False for experts with adapters, or with weights in"):
        layer(x)
    merge_lora(layer.experts)
    assert layer(x).y.isfinite().all()
    parametrize.register_parametrization(layer.experts, "w1", nn.Identity())  # of no known parts
    assert layer(x).y.isfinite().all()


def test_a_copy_is_merged_by_itself() -> None:
    layer = with_adapters(build())
    x = torch.randn(5, 32, dtype=torch.float64)
    expected = layer(x).y
    twin = copy.deepcopy(layer)
    for merged in (twin, layer):
        merge_lora(merged.experts)
        assert_close("y", merged(x).y, expected)
        assert type(merged.experts) is Experts


@pytest.mark.parametrize("bits", [None, 8])
def test_adapters_built_on_the_meta_device_are_reset(bits: int | None) -> None:
    with torch.device("meta"):
        layer = build(torch.float32, ffn_hidden_size=512)
        if bits:
            freeze_in_bits(layer.experts, bits)
        add_lora(layer.experts, rank=4, alpha=1.0)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        if not isinstance(parameter, FrozenWeight):
            parameter.data.fill_(7.0)
    layer.reset_parameters()
    state = layer.experts.state_dict()
    for name in ("w1", "w2"):
        weight = state[f"parametrizations.{name}.original"]
        assert isinstance(weight, FrozenWeight) == (bits is not None)
        assert abs(weight.std().item() - 0.3) < 0.02
        a, b = (state[f"parametrizations.{name}.0.{part}"] for part in "ab")
        assert b.abs().max() == 0
        assert 0.5 < a.abs().max().item() * a.shape[2] ** 0.5 <= 1


@pytest.mark.parametrize("overrides", [{}, {"mlp_impl": "sparse", "ffn_hidden_size": 128}], ids=str)
def test_frozen_weights_in_inference_mode(overrides: dict) -> None:
    layer = build(torch.float32, **overrides)
    freeze_in_bits(layer.experts, 8)
    x = torch.randn(5, 32)
    expected = layer(x).y
    with torch.inference_mode():
        assert torch.equal(layer(x).y, expected)
        assert torch.equal(copy.deepcopy(layer)(x).y, expected)
        assert layer.experts.w1[0].shape == layer.experts.w1.shape[1:]
    assert torch.equal(layer(x).y, expected)


def test_odd_widths_merge() -> None:
    layer = with_adapters(build(ffn_hidden_size=20))
    x = torch.randn(5, 32, dtype=torch.float64)
    twin = merged_twin(layer)
    twin.config = layer.config
    expected = layer.experts.w1 is not None and layer(x).y
    merge_lora(layer.experts)
    assert_close("y", layer(x).y, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_frozen_weights_travel_as_tensors_do(bits: int) -> None:
    layer, plain = build(torch.float32), build(torch.float32)
    plain.load_state_dict(layer.state_dict())
    freeze_in_bits(layer.experts, bits)
    x = torch.randn(9, 32)
    expected = layer(x).y
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = build(torch.float32)
    freeze_in_bits(loaded.experts, bits)
    loaded.load_state_dict(torch.load(file))
    rounded = copy.deepcopy(loaded)
    rounded.load_state_dict(plain.state_dict())  # a checkpoint in full, rounded as it is read
    plain.load_state_dict(layer.state_dict(), assign=True)
    for other in (loaded, rounded, plain, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other.experts.w1, FrozenWeight)
        assert torch.equal(other(x).y, expected)
    codes = layer.experts.w1.codes
    assert copy.deepcopy(layer).experts.w1.codes.data_ptr() != codes.data_ptr()
    layer.bfloat16()
    assert layer.experts.w1.dtype == torch.bfloat16
    assert layer.experts.w1.scales.dtype == torch.float32
    assert (layer(x.bfloat16()).y.float() - expected).norm() < 0.02 * expected.norm()
    with pytest.raises(ValueError, match="a parameter 'gate' to freeze, got Experts with w1, w2"):
        freeze_in_bits(layer.experts, bits, names=("gate",))


@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2")], ids=str)
def test_one_frozen_weight_is_enough_to_run_in_steps(names, monkeypatch) -> None:
    layer = build()
    plain = copy.deepcopy(layer)
    freeze_in_bits(layer.experts, 8, names=names)
    for name in names:
        with torch.no_grad():
            getattr(plain.experts, name).copy_(getattr(layer.experts, name))
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    results = []
    for one in (plain, layer):
        assert one.experts.stores_home() == (one is plain)
        y = one(x).y
        trained = (x, *(p for n, p in one.named_parameters() if n.split(".")[-1] not in names))
        results.append((y, *torch.autograd.grad(y.square().sum(), trained)))
        # Its product with a weight in codes is then the only place where that is decoded.
        monkeypatch.setattr(FrozenWeight, "decoded", lambda self: pytest.fail("decoded whole"))
    for expected, got in zip(*results, strict=True):
        assert_close("y or a gradient", got, expected)


def test_all_weights_are_frozen_or_none() -> None:
    layer = build(ffn_hidden_size=47)
    with pytest.raises(ValueError, match="even last dimension"):
        freeze_in_bits(layer.experts, 4)
    assert type(layer.experts.w1) is nn.Parameter
    with pytest.raises(ValueError, match="a parameter 'b1' to freeze, got Experts with w1, w2;"):
        freeze_in_bits(layer.experts, 8, names=("w1", "b1"))
    assert type(layer.experts.w1) is nn.Parameter


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_over_frozen_bits_compile(recompute: bool) -> None:
    layer = build(recompute=recompute)
    freeze_in_bits(layer.experts, 8)
    layer = with_adapters(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    trained = (x, *(p for p in layer.parameters() if p.requires_grad))
    results = []
    for run in (compiled, layer):
        y = run(x).y
        results.append((y, *torch.autograd.grad(y.square().sum(), trained)))
    for got, expected in zip(*results, strict=True):
        assert_close("y or a gradient", got, expected)
    torch._dynamo.reset()


@torch.no_grad()
def test_what_is_written_into_a_frozen_weight_is_rounded() -> None:
    other = torch.randn(2, 3, 32)
    writes = [
        lambda w: w.mul_(3.0),
        lambda w: w.add_(other, alpha=0.5),
        lambda w: w.copy_(other[0]),
        lambda w: torch.nn.init.zeros_(w),
        lambda w: torch._foreach_lerp_([w], [other], 0.5),
        lambda w: torch.add(other, 1.0, out=w),
        lambda w: w.__setitem__((0, slice(2)), other[0, :2]) or w,
    ]
    for write in writes:
        frozen = FrozenWeight.of(torch.randn(2, 3, 32), 8).share_memory_()
        plain = frozen.decoded()
        assert write(frozen) is frozen or write is writes[4]
        write(plain)
        assert torch.equal(frozen.decoded(), FrozenWeight.of(plain, 8).decoded())
    assert frozen.codes.is_shared()


def test_what_is_put_in_the_place_of_a_frozen_weight_is_there() -> None:
    layer = build(torch.float32)
    freeze_in_bits(layer.experts, 8)
    weight, values = layer.experts.w1, torch.randn(5, 96, 32)
    rounded = FrozenWeight.of(values, 8).decoded()
    weight.data = values
    assert torch.equal(layer.experts.w1.decoded(), rounded)
    assert torch.equal(weight + 0, rounded)
    weight.data += 1  # as PEFT merges adapters
    assert_close("sum", weight.decoded(), FrozenWeight.of(rounded + 1, 8).decoded())
    weight.data = FrozenWeight.of(values.half(), 4)
    assert weight.dtype == torch.float16
    assert torch.equal(weight.decoded(), FrozenWeight.of(values.half(), 4).decoded())
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        weight.data = values.long()


@pytest.mark.parametrize("names", [("w1",), ("w2",), ("w1", "w2")])
def test_a_frozen_weight_written_to_before_the_backward_pass_is_an_error(names) -> None:
    for name in names:
        layer = build()
        freeze_in_bits(layer.experts, 8, names=names)
        x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
        y = layer(x).y
        with torch.no_grad():
            getattr(layer.experts, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bits", [None, 8])
def test_adapters_written_to_before_the_backward_pass_are_an_error(
    bits: int | None, recompute: bool
) -> None:
    layer = build(mlp_bias=True, recompute=recompute)
    if bits is not None:
        freeze_in_bits(layer.experts, bits)
    add_lora(layer.experts, rank=4, alpha=8)
    for name, parameter in layer.experts.named_parameters():
        if name == "b1" and not recompute:  # only added, so not kept
            continue
        y = layer(torch.randn(9, 32, dtype=torch.float64)).y
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_frozen_weight_as_numbers_of_another_kind_is_decoded() -> None:
    frozen = FrozenWeight.of(torch.randn(2, 3, 32), 8)
    for dtype in (torch.bool, torch.int64, torch.complex64):
        other = frozen.to(dtype)
        assert type(other) is torch.Tensor
        assert torch.equal(other, frozen.decoded().to(dtype))
    assert type(torch.empty_like(frozen, dtype=torch.int64)) is torch.Tensor


def test_frozen_experts_are_saved_decoded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import mb_layers.transformers as mb
    from tiny_models import build as tiny

    model = tiny("qwen3_moe")
    for name in mb.use(model):
        freeze_in_bits(model.get_submodule(name), 8, names=("gate_up_proj", "down_proj"))
    state = model.state_dict()
    with pytest.raises(ValueError, match=r"with weight\.decoded\(\) in its place"):
        model.save_pretrained(tmp_path)
    plain = {n: t.decoded() if isinstance(t, FrozenWeight) else t for n, t in state.items()}
    model.save_pretrained(tmp_path, state_dict=plain)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "8-bit"])
@pytest.mark.parametrize("native", [False, True], ids=["transformers", "dMoE"])
def test_pefts_adapters_stay_apart(
    native: bool, bits: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PEFT's own target_parameters: its result, without its merged copy; merge and save are its."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    import mb_layers.transformers as mb
    from tiny_models import build as tiny
    from tiny_models import outputs_and_gradients

    if native:
        model: nn.Module = nn.Sequential(build(torch.float32))
        names = ("w1", "w2")
    else:
        model = tiny("qwen3_moe")
        names = ("gate_up_proj", "down_proj")
    if bits is not None:
        for module in model.modules():
            if hasattr(module, names[0]):
                freeze_in_bits(module, bits, names=names)
    parameters = [f"experts.{name}" for name in names]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[], target_parameters=parameters, init_lora_weights=False
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)

    def results() -> dict[str, Tensor]:
        if not native:
            return outputs_and_gradients(adapted)
        adapted.zero_grad()
        y = adapted.base_model.model[0](torch.randn(9, 32, generator=torch.manual_seed(2))).y
        y.square().sum().backward()
        return {"y": y} | {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}

    with monkeypatch.context() as patch:
        patch.setattr("mb_layers.experts.weight_of", getattr)  # merged
        expected = results()
    if not native:
        assert mb.use(adapted)
    seen = []
    real = mb_kernels.grouped_gemm
    monkeypatch.setattr(
        mb_kernels,
        "grouped_gemm",
        lambda x, w, *a, **k: seen.append(w.shape) or real(x, w, *a, **k),
    )
    got = results()
    assert any(16 in shape[1:] for shape in seen)  # rank 4, padded
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    if not native:
        adapted.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path)
        tokens = torch.arange(3, 12)[None]
        with torch.no_grad():
            logits = adapted(input_ids=tokens).logits
            assert_close("logits", again(input_ids=tokens).logits, logits, torch.float32)
            merged = adapted.merge_and_unload()
            difference = merged(input_ids=tokens).logits - logits
            # Over 8 bits the sum is rounded again, as whoever merges into few bits must.
            assert difference.norm() < (1e-4 if bits is None else 0.05) * logits.norm()
            kept = isinstance(merged.model.layers[0].mlp.experts.down_proj, FrozenWeight)
            assert kept == (bits is not None)
