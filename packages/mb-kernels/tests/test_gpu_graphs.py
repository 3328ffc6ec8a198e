"""Layers of kernels on a GPU: no waiting of the host, CUDA graphs, the compiler, warming up."""

import pytest
import torch
from every_op import ON_A_GPU
from mb_kernels import (
    bin_tokens,
    combine,
    expert_mlp,
    float8_linear,
    gather,
    grouped_gemm,
    linear_cross_entropy,
    router_losses,
    sparse_expert_mlp,
    topk_softmax,
    warm_up,
)
from mb_kernels.runtime import registration
from mb_kernels.runtime.recording import record
from mb_kernels.testing import Case, assert_close, make_inputs
from torch._inductor import config as inductor

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("poisoned_memory")]
knobs = pytest.importorskip("triton").knobs
NAMES = ("y", "d_logits", "dx", "dw1", "dw2")


def layer(logits, x, w1, w2, activation="swiglu", top_k=4, fp8=False):
    weights, ids, _ = topk_softmax(logits, top_k)
    bins = bin_tokens(ids, logits.shape[1])
    return expert_mlp(x, w1, w2, bins, weights, activation=activation, fp8=fp8)


def float8_layer(logits, x, w1, w2):
    y = layer(logits, x, w1, w2, fp8=True)
    return float8_linear(y, w2[0].mT.contiguous()).sum(1, keepdim=True) + y


def layer_inputs(tokens=512, hidden=256, ffn=128, experts=16):
    inputs = make_inputs(Case(tokens, hidden, ffn, experts, 4), dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
    return logits, inputs["x"], inputs["w1"], inputs["w2"]


def test_no_host_sync():
    inputs = layer_inputs()
    layer(*inputs).sum().backward()  # compiles
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = layer(*inputs)
        torch.autograd.grad(y, inputs, torch.ones_like(y))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("top_k", [1, 4], ids=["K1", "K4"])
def test_cuda_graph_replays_new_routing(top_k):
    inputs = layer_inputs()
    dy = torch.randn_like(inputs[1])
    torch.use_deterministic_algorithms(False)

    def step():
        y = layer(*inputs, top_k=top_k)
        return y, *torch.autograd.grad(y, inputs, dy)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[0].copy_(torch.randn_like(inputs[0]))
        inputs[0][:, 3] += 5
    graph.replay()
    for name, got, want in zip(NAMES, captured, step(), strict=True):
        assert torch.equal(got, want), name


def sparse_layer(logits, x, w1, w2):
    weights, ids, _ = topk_softmax(logits, 4)
    return sparse_expert_mlp(x, w1, w2, bin_tokens(ids, logits.shape[1]), weights)


def layer_of_single_ops(logits, x, w1, w2):
    """Routing with its losses, permutation and products, each an op of its own."""
    weights, ids, probs = topk_softmax(logits, 4, renormalize=True)
    bins = bin_tokens(ids, logits.shape[1])
    losses = router_losses(
        *(logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1]),
        load_balancing_weight=0.1,
        z_weight=0.1,
    )
    # In fp32, for Inductor rounds less often than eager PyTorch.
    gate, up = grouped_gemm(gather(x, bins, 4), w1, bins.offsets_E1).float().chunk(2, dim=1)
    a = (torch.nn.functional.silu(gate) * up).to(x.dtype)
    rows = grouped_gemm(a, w2, bins.offsets_E1)
    return combine(rows, bins, weights) + losses.aux_loss.to(x.dtype)


LAYERS = [layer, sparse_layer, layer_of_single_ops, float8_layer]


def test_compiles_without_a_graph_break():
    inputs = layer_inputs()
    y = layer(*inputs)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, inputs, dy)
    got_y = torch.compile(layer, fullgraph=True)(*inputs)
    got = torch.autograd.grad(got_y, inputs, dy)
    for name, g, w in zip(NAMES, (got_y, *got), (y, *want), strict=True):
        assert_close(name, g, w)


@pytest.mark.parametrize("function", LAYERS, ids=lambda function: function.__name__)
def test_reduce_overhead_captures_the_whole_layer(function):
    """Inductor leaves nothing out of its CUDA graphs, and a replay launches no kernel by itself."""
    if function is sparse_layer:
        pytest.importorskip("stk")
    torch.use_deterministic_algorithms(False)
    inputs = layer_inputs()
    dy = torch.randn_like(inputs[1])
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")

    def step(f):
        torch.compiler.cudagraph_mark_step_begin()
        y = f(*inputs)
        return [t.clone() for t in (y, *torch.autograd.grad(y, inputs, dy))]

    with (
        # Not in several graphs with something between them, and not without any.
        inductor.patch({"graph_partition": False, "triton.cudagraph_or_error": True}),
        torch.autograd.set_multithreading_enabled(False),  # ``record`` lists one thread's launches
    ):
        for _ in range(3):  # runs, is recorded, is replayed
            step(compiled)
        with torch.no_grad():
            inputs[0].copy_(torch.randn_like(inputs[0]))
            inputs[0][:, 3] += 5
        with record() as launches:
            got = step(compiled)
    assert launches == []
    for name, g, w in zip(NAMES, got, step(function), strict=True):
        assert_close(name, g, w, dtype=torch.bfloat16)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("activation", "top_k"), [("geglu", 2), ("relu", 1)])
def test_a_warm_layer_compiles_nothing(activation, top_k, fp8, monkeypatch):
    sizes = {"tokens": 272, "hidden_size": 200, "ffn_hidden_size": 170, "num_experts": 8}
    more = {"top_k": top_k, "activation": activation, "renormalize": True, "fp8": fp8}
    assert warm_up(**sizes, **more).result(timeout=120) > 10
    compiled = []
    hook = "jit_cache_hook"
    monkeypatch.setattr(knobs.runtime, hook, lambda **given: compiled.append(given["fn"].name))
    x, w1, w2, logits = (
        torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
        for shape, dtype in (
            ((272, 200), torch.bfloat16),
            ((8, 340 if activation == "geglu" else 170, 200), torch.bfloat16),
            ((8, 200, 170), torch.bfloat16),
            ((272, 8), torch.float32),
        )
    )
    weights, ids, probs = topk_softmax(logits, top_k, renormalize=True)
    bins = bin_tokens(ids, 8)
    losses = router_losses(
        *(logits, probs, bins.tokens_per_expert_E, bins.offsets_E1[-1]),
        load_balancing_weight=0.1,
        z_weight=0.1,
    )
    y = expert_mlp(x, w1, w2, bins, weights, activation=activation, fp8=fp8)
    (y.float().sum() + losses.aux_loss).backward()
    assert compiled == []


def test_debug_refuses_ids_of_no_expert_but_not_in_a_capture(monkeypatch):
    monkeypatch.setattr(registration, "_debug", True)
    ids = torch.tensor([[0, 7]], device="cuda")
    with pytest.raises(ValueError, match=r"expected 0 to 1, or -1 or 2 .* got 7 at \[0, 1\]"):
        bin_tokens(ids, 2)
    bin_tokens(ids % 2, 2)
    x, labels = torch.zeros(2, 16, device="cuda"), torch.zeros(2, dtype=torch.long, device="cuda")
    linear_cross_entropy(x, x, labels)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        bin_tokens(ids, 2)
        linear_cross_entropy(x, x, labels)
