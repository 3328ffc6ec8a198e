"""On a GPU: the layers against their CPU twin in fp64, without host syncs, compiled, captured."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from layers_oracle import ACTIVATIONS, GATES
from mb_kernels.runtime.plan import assume, plan_for
from mb_kernels.targets import current_target
from mb_layers import (
    AsMLP,
    ExpertChoiceRouter,
    MoE,
    MoEConfig,
    NoisyTopKRouter,
    SinkhornRouter,
    SparseMixerRouter,
    add_lora,
    collect,
    dMoE,
    freeze_in_bits,
    update_balancing_biases,
)
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 64, "ffn_hidden_size": 96, "num_experts": 7, "top_k": 2}
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
        "shared_expert_hidden_size": 64,
        "shared_expert_gate": True,
        "balance_over": "sequence",
    },
    "sigmoid": {"score_function": "sigmoid", "renormalize": True},
    "biases-recompute": {"mlp_bias": True, "output_bias": True, "recompute": True},
    "biases-capacity": {"mlp_bias": True, "capacity_factor": 0.8},
    "8-bit": {"saved_activation_bits": 8},
    "4-bit": {"saved_activation_bits": 4},
    "sparse": {"mlp_impl": "sparse", "ffn_hidden_size": 256},
    "odd-widths": {"hidden_size": 64, "ffn_hidden_size": 83},
    "zero-experts": {"num_zero_experts": 2, "top_k": 3},
    "weights-on-input": {"weights_on_input": True},
    **{name: {"activation": name} for name in (*GATES, *ACTIVATIONS)},
}
# Largest error of a tensor over its largest entry.
BOUND = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


def build(dtype: torch.dtype, **overrides) -> dMoE:
    config = MoEConfig(**(SIZES | {"init_method_std": 0.1, "z_loss_weight": 0.01} | overrides))
    return (dMoE if config.capacity_factor is None else MoE)(config, dtype=dtype)


def run(layer: dMoE, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y, aux, metrics = layer(x)
    grads = torch.autograd.grad([y, aux], [x, *layer.parameters()], [dy, torch.ones_like(aux)])
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"y": y, "aux": aux} | metrics | {f"d {n}": g for n, g in zip(names, grads, strict=True)}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_equals_cpu_in_fp64(kind: str, dtype: torch.dtype) -> None:
    layer = build(dtype, **KINDS[kind])
    x, dy = torch.randn(3, 50, 64).to(dtype), torch.randn(3, 50, 64).to(dtype)
    expected = run(copy.deepcopy(layer).double(), x.double(), dy.double())
    got = run(layer.cuda(), x.cuda(), dy.cuda())
    assert torch.equal(got["tokens_per_expert"].cpu(), expected["tokens_per_expert"])
    # Gradients at rounded pre-activations, in fp64 too: only where they round apart do they differ.
    bound = BOUND[dtype] + {None: 0, 8: 0.01, 4: 0.1}[layer.config.saved_activation_bits]
    for name, tensor in expected.items():
        error = (got[name].cpu().double() - tensor).abs().max()
        assert error <= bound * tensor.abs().max().clamp(min=1e-6), name


def test_products_in_8_bits_equal_the_cpus() -> None:
    """Numbers that bf16 has rounded may round to the next code: a step of 1/8, of few of them."""
    if current_target().float8 is None:
        pytest.skip("this GPU has no products in 8-bit floats")
    layer = build(torch.bfloat16, fp8=True, shared_expert_hidden_size=64)
    x, dy = torch.randn(3, 50, 64).bfloat16(), torch.randn(3, 50, 64).bfloat16()
    with assume(partial(plan_for, current_target(), units=1, hopper=False)):  # its format
        expected = run(copy.deepcopy(layer).double(), x.double(), dy.double())
    for name, tensor in run(layer.cuda(), x.cuda(), dy.cuda()).items():
        want = expected[name]
        if not want.is_floating_point():
            assert torch.equal(tensor.cpu(), want), name
        else:
            assert (tensor.cpu() - want).norm() <= 0.04 * want.norm(), name


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_transformers_experts_as_their_checkpoints_lie(dtype: torch.dtype) -> None:
    """GPT-OSS's: biases, a clamped gate, its columns by turns with up's, weights transposed."""
    pytest.importorskip("transformers")
    from mb_layers.transformers.experts import IMPLEMENTATION, fused_activation, recognise_gate
    from tiny_models import build as build_model

    model = build_model("gpt_oss")
    experts = model.model.layers[0].mlp.experts.to(dtype)
    x, ids, weights = (
        torch.randn(50, 32).to(dtype),
        torch.rand(50, 4).topk(2).indices,
        torch.rand(50, 2),
    )

    def call(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
        y = module(*inputs)
        grads = torch.autograd.grad(y, [*module.parameters()], torch.ones_like(y))
        return {"y": y} | {n: g for (n, _), g in zip(module.named_parameters(), grads, strict=True)}

    expected = call(copy.deepcopy(experts).double(), x.double(), ids, weights.double())
    model.config._experts_implementation = IMPLEMENTATION
    recognise_gate(experts)
    assert fused_activation(experts) is not None
    got = call(experts.cuda(), x.cuda(), ids.cuda(), weights.cuda())
    for name, tensor in expected.items():
        error = (got[name].cpu().double() - tensor).abs().max()
        assert error <= BOUND[dtype] * tensor.abs().max(), name


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (*GATES, *ACTIVATIONS)])
def test_no_host_sync(kind: str) -> None:
    layer = build(torch.bfloat16, **KINDS[kind]).cuda()
    x, dy = (torch.randn(2, 48, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    run(layer, x, dy)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, x, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["dMoE", "MoE", "MoE-probability", "deepseek-v3"])
def test_masked_layer_is_the_layer_of_the_real_tokens(kind: str) -> None:
    layer = build(torch.float32, **KINDS[kind] | {"balance_over": "micro_batch"}).cuda()
    x, dy = torch.randn(4, 50, 64, device="cuda"), torch.randn(4, 50, 64, device="cuda")
    mask = torch.arange(50, device="cuda") < torch.tensor([50, 31, 1, 0], device="cuda")[:, None]
    real, real_dy = x[mask], dy[mask]
    expected = run(layer, real, real_dy)
    layer(x, mask=mask)  # compiles what the mask adds
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, aux, metrics = layer(x, mask=mask)
        grads = torch.autograd.grad(
            [y, aux], list(layer.parameters()), [dy, torch.ones_like(aux)], allow_unused=True
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not y[~mask].any()
    got = {"y": y[mask], "aux": aux} | metrics
    got |= {f"d {n}": g for (n, _), g in zip(layer.named_parameters(), grads, strict=True)}
    for name, tensor in got.items():
        scale = expected[name].abs().max().clamp(min=1e-6)
        assert (tensor - expected[name]).abs().max() <= 1e-3 * scale, name


@pytest.mark.parametrize(
    "router", [ExpertChoiceRouter, SinkhornRouter, NoisyTopKRouter, SparseMixerRouter]
)
def test_routers_wait_for_no_one(router: type) -> None:
    config = MoEConfig(**SIZES)
    layer = dMoE(config, router=router(config)).cuda()
    x = torch.randn(200, 64, device="cuda", requires_grad=True)
    mask = torch.arange(200, device="cuda") < 150
    (layer(x, mask=mask).y.sum()).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, aux, _ = layer(x, mask=mask)
        (y.sum() + aux).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not y[150:].any()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_adapters_keep_no_copy_of_the_weights(bits: int | None) -> None:
    layer = build(torch.bfloat16, num_experts=64, hidden_size=1024, ffn_hidden_size=1024).cuda()
    if bits is not None:
        freeze_in_bits(layer.experts, bits)
    add_lora(layer.experts, rank=16, alpha=16.0)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    layer(x).y.sum().backward()
    weights = 64 * 3 * 1024 * 1024 * 2
    before = torch.cuda.memory_allocated()
    y = layer(x).y
    assert torch.cuda.memory_allocated() - before < weights / 20
    y.sum().backward()
    assert layer.experts.parametrizations.w1[-1].b.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["dMoE", "deepseek-v3"])
def test_compiled_with_inductor(kind: str) -> None:
    layer = build(torch.bfloat16, **KINDS[kind]).cuda()
    x, dy = (torch.randn(2, 48, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = run(layer, x, dy)
    compiled = torch.compile(layer, fullgraph=True)
    x = x.requires_grad_()
    y, aux, _ = compiled(x)
    grads = torch.autograd.grad([y, aux], [x, *layer.parameters()], [dy, torch.ones_like(aux)])
    for tensor, name in zip((y, aux, *grads), ("y", "aux", *list(expected)[8:]), strict=True):
        scale = expected[name].abs().max()
        assert (tensor - expected[name]).abs().max() <= 3e-2 * scale, name


def test_a_cuda_graph_holds_the_layer() -> None:
    """Captured once, replayed on other tokens with another routing."""
    layer = build(torch.bfloat16).cuda()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(x)
    other = torch.randn_like(x)
    with torch.no_grad():
        expected = layer(other)
    x.copy_(other)
    graph.replay()
    assert torch.equal(captured.y, expected.y)
    for name, value in expected.metrics.items():
        assert torch.equal(captured.metrics[name], value), name


def test_make_graphed_callables() -> None:
    """Forward and backward each a graph, so that autograd can run as usual around them."""
    layer = build(torch.bfloat16).cuda()
    graphed = copy.deepcopy(layer)
    x, dy = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.cuda.make_graphed_callables(graphed, (x.clone().requires_grad_(),))
    with torch.no_grad():
        for a, b in zip(layer.parameters(), graphed.parameters(), strict=True):
            b.copy_(a.mul_(1.5))  # as an optimizer would, after the capture
    expected, got = run(layer, x, dy), run(graphed, x, dy)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_layers_on_two_devices_take_the_steps_of_one() -> None:
    class Spread(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = x.to(next(layer.parameters()).device)
                x = x + layer(x)
            return x

    def layer() -> AsMLP:
        config = MoEConfig(**SIZES, init_method_std=0.1, z_loss_weight=0.01, balancing_bias=True)
        return AsMLP(dMoE(config), aux_scale=None)

    one = Spread([layer(), layer()])
    two = copy.deepcopy(one)
    two[1].cuda()
    x, steps = torch.randn(33, 64), []
    for model in (one, two):
        with collect(model) as moe:
            y = model(x)
        (y.square().mean() + moe.aux_loss()).backward()
        update_balancing_biases([moe], rate=1e-3)
        biases = {n: b for n, b in model.named_buffers() if b.dim()}
        grads = {n: p.grad for n, p in model.named_parameters()}
        steps.append({"loss": moe.aux_loss().detach()} | moe.metrics() | biases | grads)
    for name, value in steps[0].items():
        torch.testing.assert_close(steps[1][name].cpu(), value, rtol=2e-3, atol=2e-4, msg=name)
