"""Layers with other tools: compile, checkpoint, FSDP2, DTensor, autocast, LoRA."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import layers_workers
import pytest
import torch
from layers_oracle import assert_close
from mb_layers import (
    AsMLP,
    MoE,
    MoEConfig,
    RouterOutput,
    add_lora,
    attach_aux_loss,
    dMoE,
    freeze_in_bits,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

SIZES = {"hidden_size": 16, "ffn_hidden_size": 16, "num_experts": 5, "top_k": 2}
KINDS = {
    "dMoE": {},
    "MoE": {"capacity_factor": 0.8},
    "MoE-probability": {"capacity_factor": 0.8, "drop_policy": "probability"},
    "deepseek-v3": {
        "num_experts": 8,
        "num_expert_groups": 4,
        "top_k_groups": 2,
        "score_function": "sigmoid",
        "renormalize": True,
        "balancing_bias": True,
        "shared_expert_hidden_size": 32,
        "shared_expert_gate": True,
        "balance_over": "sequence",
    },
    "biases-recompute": {"mlp_bias": True, "output_bias": True, "recompute": True},
    "jitter": {"jitter_eps": 0.1, "router_bias": True},
    "8-bit": {"saved_activation_bits": 8},
    "sparse": {"mlp_impl": "sparse", "ffn_hidden_size": 128},
}


def build(dtype: torch.dtype = torch.float64, device: str | None = None, **overrides) -> dMoE:
    config = MoEConfig(**(SIZES | {"init_method_std": 0.3, "z_loss_weight": 0.1} | overrides))
    cls = dMoE if config.capacity_factor is None else MoE
    return cls(config, dtype=dtype, device=device)


def grads_of(layer: nn.Module, x: Tensor, run=None) -> dict[str, Tensor]:
    """y, aux_loss and the gradients of a loss of both, for the input and every parameter."""
    torch.manual_seed(3)
    x = x.detach().clone().requires_grad_()
    y, aux, _ = (layer if run is None else run)(x)
    parameters = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(y.square().sum() + aux, (x, *parameters.values()))
    return {"y": y, "aux_loss": aux} | dict(zip(("x", *parameters), grads, strict=True))


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, got[name], tensor)


COMPILED = ("dMoE", "MoE", "jitter", "8-bit")
FURTHER = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in COMPILED]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [*COMPILED, *FURTHER])
def test_compiles_without_graph_breaks(kind: str) -> None:
    """Some for any number of tokens at once, some for one number, dMoE for one and then for any."""
    layer = build(**KINDS[kind])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dynamic = True if kind in ("MoE", "MoE-probability", "deepseek-v3", "sparse") else None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (6, 9) if dynamic or kind == "dMoE" else (6,):
        x = torch.randn(2, length, 16, dtype=torch.float64)
        if kind == "jitter":  # the generator is consumed in another order when compiled
            assert torch.isfinite(grads_of(layer, x, run=compiled)["router.weight"]).all()
        else:
            assert_same(grads_of(layer, x, run=compiled), grads_of(layer, x))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (2 if kind == "dMoE" else 1)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["dMoE", "MoE", "biases-recompute", "sparse"])
def test_exports_with_a_dynamic_batch_and_saves(kind: str) -> None:
    layer = build(**KINDS[kind]).eval()
    batch = torch.export.Dim("batch", min=2, max=4096)
    sample = torch.randn(8, 16, dtype=torch.float64)
    program = torch.export.export(layer, (sample,), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    x = torch.randn(11, 16, dtype=torch.float64)
    got, expected = loaded(x), layer(x)
    assert_close("y", got.y, expected.y)
    assert got.metrics.keys() == expected.metrics.keys()


def test_a_program_that_takes_a_routing_saves() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = build()

        def forward(self, x: Tensor, routing: RouterOutput) -> tuple[Tensor, RouterOutput]:
            return self.layer(x, routing=routing).y, self.layer.route(x)

    model = Routed()
    x = torch.randn(8, 16, dtype=torch.float64)
    routing = model.layer.route(x.flip(0))
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x, routing)), file)
    file.seek(0)
    got, expected = torch.export.load(file).module()(x, routing), model(x, routing)
    assert_close("y", got[0], expected[0])
    assert isinstance(got[1], RouterOutput)
    assert_close("weights", got[1].weights_TK, expected[1].weights_TK)


def test_layers_that_recompute_are_exported_too() -> None:
    adapted = build(recompute=True)
    freeze_in_bits(adapted.experts, 8)
    add_lora(adapted.experts, rank=2, alpha=2)
    x = torch.randn(8, 16, dtype=torch.float64)
    for layer in (build(recompute=True, mlp_impl="sparse", ffn_hidden_size=128), adapted):
        program = torch.export.export(layer.eval(), (x,), strict=True)
        assert_close("y", program.module()(x).y, layer(x).y)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_trains_as_the_layer(strict: bool) -> None:
    adapted = build(recompute=True)
    freeze_in_bits(adapted.experts, 8)
    add_lora(adapted.experts, rank=2, alpha=2)
    for name, parameter in adapted.named_parameters():
        if name.endswith(".b"):  # zero at first, and so were the gradients behind it
            nn.init.normal_(parameter)
    for layer in (build(), adapted):
        below = nn.Linear(16, 16, dtype=torch.float64)
        model = nn.Sequential(below, layer)
        x = torch.randn(8, 16, dtype=torch.float64)
        program = torch.export.export(model, (x,), strict=strict).module()
        x = x.requires_grad_()
        got, expected = grads_of(program, x), grads_of(model, x)
        assert_same({n: got[n] for n in expected}, expected)


@pytest.mark.parametrize("strict", [False, True])
def test_an_attached_loss_is_not_lost_in_an_export(strict: bool) -> None:
    class Stage(AsMLP):
        def forward(self, x: Tensor) -> Tensor:
            y, aux_loss, _ = self.layer(x)
            return attach_aux_loss(y, aux_loss)

    model = Stage(build(), aux_scale=None)
    x = torch.randn(8, 16, dtype=torch.float64)
    with pytest.raises(Exception, match="expected an aux_loss without gradient"):
        torch.export.export(model, (x,), strict=strict)

    program = torch.export.export(model.eval(), (x,), strict=strict)
    assert_close("y", program.module()(x), model(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_gives_the_same_gradients(kind: str, use_reentrant: bool) -> None:
    layer = build(**KINDS[kind])
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    expected = grads_of(layer, x)

    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y, aux, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
    (y.square().sum() + aux).backward()
    got = {"y": y, "aux_loss": aux, "x": x.grad}
    got |= {name: p.grad for name, p in layer.named_parameters()}
    assert_same(got, expected)


def test_checkpoint_keeps_the_gradient_of_the_auxiliary_loss() -> None:
    layer = build()
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).aux_loss, layer.router.weight)
    assert expected.abs().max() > 1e-4
    for use_reentrant in (False, True):
        layer.zero_grad()
        _, aux, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
        aux.backward()
        assert_close("d router.weight", layer.router.weight.grad, expected)


def test_fsdp2_dtensor_weights_and_global_balance_on_two_ranks() -> None:
    """One spawn for the three: starting processes is most of their cost."""
    layers_workers.run_on_ranks()


def test_autocast_computes_experts_low_and_router_high() -> None:
    layer = build(torch.float32, shared_expert_hidden_size=16, shared_expert_gate=True)
    x = torch.randn(9, 16)
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        routed = layer.router(x)
        y, aux, metrics = layer(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - plain.y).norm() < 0.02 * plain.y.norm()
    assert torch.equal(routed.logits_TE, layer.router(x).logits_TE)
    assert torch.equal(aux, plain.aux_loss)
    assert all(torch.equal(value, plain.metrics[name]) for name, value in metrics.items())
    grads = torch.autograd.grad(y.float().sum() + aux, layer.parameters())
    assert all(g.dtype == torch.float32 for g in grads)
    wide = layer.double()
    want = wide(x.double()).y
    with torch.autocast("cpu", torch.bfloat16):  # leaves fp64 as it is
        assert torch.equal(wide(x.double()).y, want)


def test_a_backward_pass_within_autocast_is_that_without() -> None:
    torch.manual_seed(0)
    layer = dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4, top_k=2))
    x = torch.randn(8, 16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    y, aux_loss, _ = layer(x)
    loss = (y.sum() + aux_loss) * 2**16  # as scaled for fp16, which holds no such gradients
    want = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.float16):
        got = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_compiled_routers_gradient_is_not_rounded_under_autocast() -> None:
    router, x = build(torch.float32).router, torch.randn(9, 16, requires_grad=True)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        runs = [run(x).logits_TE for run in (compiled, router)]
    got, want = (torch.autograd.grad(y.sin().sum(), [x, router.weight]) for y in runs)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"score_function": "sigmoid"}, {"mlp_bias": True}, {"shared_expert_hidden_size": 16}],
    ids=str,
)
def test_gradcheck_undefined_gradients_too(overrides: dict) -> None:
    layer = build(num_experts=3, **overrides)
    named = dict(layer.named_parameters())

    def outputs(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        parameters = dict(zip(named, weights, strict=True))
        y, aux, _ = functional_call(layer, parameters, (x,))
        return y, aux

    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(outputs, (x, *named.values()), fast_mode=True)


@pytest.mark.parametrize("kind", ["dMoE", "lora"])
def test_second_derivatives_are_refused_and_not_wrong(kind: str) -> None:
    # With sigmoids the router has second derivatives: nobody but the experts refuses them.
    layer = build(**{"score_function": "sigmoid"} if kind == "lora" else {})
    if kind == "lora":
        add_lora(layer.experts, rank=2, alpha=2)
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    loss = layer(x).y.square().sum()
    with pytest.raises(RuntimeError, match="expected first derivatives"):
        torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="a transform of torch"):
        torch.func.grad(lambda x: layer(x).y.sum())(x.detach())


@pytest.mark.parametrize("kind", ["dMoE", "sparse", "lora"])
def test_a_trace_is_refused_by_name(kind: str) -> None:
    layer = build(**KINDS.get(kind, {})).eval()
    if kind == "lora":
        add_lora(layer.experts, rank=2, alpha=2)
    x = torch.randn(4, 16, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"got torch\.jit\.trace"):
        torch.jit.trace(AsMLP(layer, aux_scale=None), (x,))


def test_functional_call_uses_the_given_weights() -> None:
    layer = build()
    other = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    twin = copy.deepcopy(layer)
    twin.load_state_dict(other)
    x = torch.randn(5, 16, dtype=torch.float64)
    assert torch.equal(functional_call(layer, other, (x,)).y, twin(x).y)


def test_deepcopy_and_state_dict_round_trip() -> None:
    layer = build(balancing_bias=True, mlp_bias=True, shared_expert_hidden_size=16)
    layer.router.balancing_bias.uniform_()
    x = torch.randn(6, 16, dtype=torch.float64)
    expected = layer(x).y
    clone = copy.deepcopy(layer)
    fresh = build(balancing_bias=True, mlp_bias=True, shared_expert_hidden_size=16)
    assert not torch.equal(fresh(x).y, expected)
    fresh.load_state_dict(layer.state_dict())
    with torch.no_grad():
        layer.experts.w1.zero_()
    assert torch.equal(clone(x).y, expected)
    assert torch.equal(fresh(x).y, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_init_then_reset_parameters(kind: str) -> None:
    layer = build(device="meta", **KINDS[kind])
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.fill_(float("nan"))
    torch.manual_seed(7)
    layer.reset_parameters()
    torch.manual_seed(7)
    expected = build(**KINDS[kind]).state_dict()
    assert layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in layer.state_dict().items())


def test_meta_tensors_give_shapes() -> None:
    layer = build(device="meta", shared_expert_hidden_size=16, shared_expert_gate=True)
    y, aux, metrics = layer(torch.empty(3, 4, 16, device="meta", dtype=torch.float64))
    assert y.is_meta
    assert y.shape == (3, 4, 16)
    assert aux.shape == ()
    assert metrics["tokens_per_expert"].shape == (5,)


def test_flops_are_counted() -> None:
    layer = build()
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y, aux, _ = layer(x)
        forward = counter.get_total_flops()
        (y.sum() + aux).backward()
    router = 2 * 8 * 16 * 5
    experts = 2 * 8 * 2 * (3 * 16 * 16)
    assert forward == router + experts
    assert counter.get_total_flops() == 3 * (router + experts)


def test_init_follows_the_stds_of_the_config() -> None:
    config = MoEConfig(
        hidden_size=128,
        ffn_hidden_size=128,
        num_experts=8,
        init_method_std=0.02,
        output_init_std=0.003,
    )
    layer = dMoE(config)
    for name, std in (("router.weight", 0.02), ("experts.w1", 0.02), ("experts.w2", 0.003)):
        weights = layer.get_parameter(name)
        assert weights.std().item() == pytest.approx(std, rel=0.1)
        assert abs(weights.mean().item()) < 0.2 * std


def test_frozen_experts_still_train_the_router() -> None:
    layer = build()
    x = torch.randn(8, 16, dtype=torch.float64)
    expected = grads_of(layer, x)
    layer.experts.requires_grad_(False)
    got = grads_of(layer, x)
    assert "experts.w1" not in got
    assert_same(got, {name: expected[name] for name in got})


def test_frozen_router_still_trains_the_experts() -> None:
    layer = build()
    x = torch.randn(8, 16, dtype=torch.float64)
    expected = grads_of(layer, x)
    layer.router.requires_grad_(False)
    got = grads_of(layer, x)
    assert_same(got, {name: expected[name] for name in got})


class _LowRank(nn.Module):
    """W + B A for every expert."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        num_experts, rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(num_experts, rank, columns, dtype=weight.dtype))
        self.b = nn.Parameter(torch.randn(num_experts, rows, rank, dtype=weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def test_lora_wrapped_weights() -> None:
    layer = build()
    layer.requires_grad_(False)
    for name in ("w1", "w2"):
        adapter = _LowRank(getattr(layer.experts, name), rank=2)
        parametrize.register_parametrization(layer.experts, name, adapter)
    x = torch.randn(7, 16, dtype=torch.float64)
    y = layer(x).y
    merged = build()
    merged.load_state_dict(
        {
            "router.weight": layer.router.weight,
            "experts.w1": layer.experts.w1,
            "experts.w2": layer.experts.w2,
        }
    )
    y_merged = merged(x).y
    assert_close("y", y, y_merged)
    y.square().sum().backward()
    (d_w1,) = torch.autograd.grad(y_merged.square().sum(), merged.experts.w1)
    lora = layer.experts.parametrizations.w1[0]
    assert_close("d a", lora.a.grad, lora.b.mT @ d_w1)
    assert_close("d b", lora.b.grad, d_w1 @ lora.a.mT)


def test_weights_made_of_several_tensors() -> None:
    layer, plain = build(), build()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(7, 16, dtype=torch.float64)
    for module, name in ((layer.experts, "w1"), (layer.experts, "w2"), (layer.router, "weight")):
        nn.utils.parametrizations.weight_norm(module, name)
    y = layer(x).y
    assert_close("y", y, plain(x).y)
    y.square().sum().backward()
    (d_w1,) = torch.autograd.grad(plain(x).y.square().sum(), plain.experts.w1)
    length = layer.experts.parametrizations.w1.original0
    along = (d_w1 * plain.experts.w1).sum(dim=(1, 2), keepdim=True) / length
    assert_close("d length", length.grad, along)


def test_two_models_and_accumulation_do_not_meet() -> None:
    first, second = build(), build(top_k=1)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    alone = [grads_of(layer, x) for layer in (first, second)]
    out_first, out_second = first(x), second(x)  # interleaved, backward in the other order
    for out, layer, expected in ((out_second, second, alone[1]), (out_first, first, alone[0])):
        (out.y.square().sum() + out.aux_loss).backward()
        for name, p in layer.named_parameters():
            assert_close(name, p.grad, expected[name])
    for layer, expected in ((first, alone[0]), (second, alone[1])):
        y, aux, _ = layer(x)  # a second micro-batch adds to the gradients
        (y.square().sum() + aux).backward()
        for name, p in layer.named_parameters():
            assert_close(name, p.grad, 2 * expected[name])


def test_importing_and_running_a_layer_imports_nothing_slow() -> None:
    code = """
import sys, torch, mb_layers.compat
from mb_layers import MoEConfig, dMoE
layer = dMoE(MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=4))
layer(torch.randn(3, 16)).y.sum().backward()
print({"transformers", "torch.distributed.tensor"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_experts_that_any_hook_watches_return_their_output() -> None:
    experts = build().experts
    assert experts.stores_home()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not experts.stores_home()
    finally:
        hook.remove()
    experts.register_forward_hook(lambda *_: None)
    assert not experts.stores_home()


def test_repr_names_the_sizes() -> None:
    text = repr(build())
    assert "16 -> 5, top_k=2" in text
    assert "5 x (16 -> 16 -> 16), activation='swiglu'" in text
