"""The Triton kernels on a GPU in every dtype, against float64; graphs, syncs, determinism."""

from dataclasses import replace

import pytest
import torch
from mb_kernels import (
    VocabularyShard,
    adamw_step,
    bin_tokens,
    combine,
    expert_mlp,
    gather,
    grouped_gemm,
    linear_cross_entropy,
    muon_momentum,
    muon_step,
    reference,
    router_losses,
    sparse_expert_mlp,
    sum_of_squares,
    symmetric_matmul,
    topk_ids,
    topk_softmax,
    warm_up,
)
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS
from mb_kernels.exchange import Layout, PeerMemory
from mb_kernels.runtime import registration
from mb_kernels.runtime.launch import record
from mb_kernels.runtime.plan import assume, plan_of
from mb_kernels.testing import (
    GPT_OSS,
    NUMBERED,
    TOLERANCES,
    Case,
    assert_close,
    expert_mlp_errors,
    make_expert_ids,
    make_inputs,
    run_expert_mlp,
)
from torch._inductor import config as inductor

knobs = pytest.importorskip("triton").knobs
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    Case(517, 320, 176, 7, 2),
    Case(1000, 256, 512, 16, 8, "skewed"),
    Case(300, 128, 384, 4, 1, "uniform", None, "gelu"),
    Case(700, 192, 272, 9, 1, "skewed", 50, "gelu_tanh"),
    Case(640, 512, 128, 8, 4, "empty_experts"),
    Case(256, 64, 64, 5, 1, "one_expert"),
    Case(333, 144, 80, 512, 3, "uniform"),
    Case(200, 128, 128, 1, 1),
    Case(411, 128, 128, 6, 2, "skewed", 60),
    Case(1300, 144, 208, 2, 1),
    Case(300, 208, 2064, 3, 2, "skewed", 90),
    Case(300, 128, 4096, 3, 1, "uniform", None, "gelu"),
    Case(0, 128, 128, 4, 2),
    Case(1, 16, 16, 2, 1),
    Case(517, 320, 176, 7, 2, activation="swigluoai", bias=torch.bfloat16),
    # No relu with a bias: rounding decides on which side of 0 a sum lies, and so its gradient.
    Case(1000, 256, 512, 16, 8, "skewed", None, "geglu_tanh", torch.float32),
    Case(700, 192, 272, 9, 1, "skewed", 50, "gelu", torch.float32),
    Case(40, 128, 144, 16, 2, "empty_experts", None, "geglu", torch.float16),
    # Weights that lie transposed, gates and ups by turns; the last with a decoder's few rows.
    Case(517, 320, 176, 7, 2, "skewed", None, GPT_OSS, torch.bfloat16, (True, True)),
    Case(1000, 256, 512, 16, 8, "skewed", None, "swiglu(limit=4.5)", None, (True, True)),
    Case(700, 192, 272, 9, 1, "skewed", 50, "gelu", torch.float32, (True, True)),
    Case(24, 320, 176, 16, 2, "skewed", None, GPT_OSS, torch.bfloat16, (True, True)),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty returns NaN, so that an element no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_mlp(case, dtype):
    errors = expert_mlp_errors(case, dtype=dtype, device="cuda")
    assert max(errors.values()) <= TOLERANCES[dtype], errors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_portable_kernels_where_hopper_has_its_own(case):
    plan = replace(plan_of(torch.empty(0, dtype=torch.bfloat16, device="cuda")), specialized=False)
    with assume(lambda dtype: plan if dtype is torch.bfloat16 else replace(plan, dtype=dtype)):
        errors = expert_mlp_errors(case, dtype=torch.bfloat16, device="cuda")
    assert max(errors.values()) <= TOLERANCES[torch.bfloat16], errors


@pytest.mark.parametrize("activation", [*GLU_ACTIVATIONS, *NUMBERED, *PLAIN_ACTIVATIONS])
def test_activations(activation):
    case = Case(300, 128, 192, 4, 2, activation=activation)
    errors = expert_mlp_errors(case, dtype=torch.bfloat16, device="cuda", recompute=True)
    assert max(errors.values()) <= TOLERANCES[torch.bfloat16], errors


@pytest.mark.parametrize("activation", ["squared_relu", "reglu(limit=3)", GPT_OSS])
def test_what_is_no_number_passes_the_activation(activation):
    """Of gate or of up: a clamp or a maximum would make a number of it, and hide a diverged run."""
    case = Case(64, 64, 64, 4, 2, activation=activation, bias=torch.float32)
    inputs = make_inputs(case, dtype=torch.bfloat16, device="cuda")
    x, w1, w2, bins, weights, _, b1, b2 = inputs.values()
    slots = bins.order_N[bins.offsets_E1[1] : bins.offsets_E1[2]]
    want = torch.zeros(64, dtype=torch.bool, device="cuda").index_fill(0, slots.long() // 2, True)
    assert 0 < want.sum() < 64
    for column in (6, 7, b1.shape[1] - 1):
        bias = b1.detach().clone()
        bias[1, column] = torch.nan
        y = expert_mlp(x, w1, w2, bins, weights, activation=activation, b1_EF=bias, b2_ED=b2)
        assert torch.equal(y.isnan().all(1), want), column
        assert torch.equal(y.isnan().any(1), want), column


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["EMK", "EKM"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offsets", [[0, 0, 130, 130, 400], [0, 10, 20, 20, 33]], ids=str)
def test_grouped_gemm(offsets, dtype, transpose_weight):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 208, generator=generator)
    w = torch.randn((4, 336, 208) if transpose_weight else (4, 208, 336), generator=generator)
    dy = torch.randn(400, 336, generator=generator)
    x[offsets[-1] :] = float("nan")  # rows of no expert are never used
    offsets = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    got, want = [], []
    for op, to, out in ((grouped_gemm, dtype, got), (reference.grouped_gemm, torch.float64, want)):
        leaves = [t.to(dtype).to("cuda", to).requires_grad_() for t in (x, w)]
        y = op(*leaves, offsets, transpose_weight=transpose_weight)
        out += [y, *torch.autograd.grad(y, leaves, dy.to(dtype).to("cuda", to))]
    for name, g, w in zip(("y", "dx", "dw"), got, want, strict=True):
        assert_close(name, g, w)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capacity", [None, 40])
def test_gather_and_combine(capacity, dtype):
    ids = make_expert_ids("skewed", 501, 9, 3, device="cuda")
    bins = bin_tokens(ids, 9, capacity=capacity)
    x, dy = torch.randn(2, 501, 80, device="cuda").to(dtype)
    weights = torch.rand(501, 3, device="cuda")
    results = {}
    for ops, to in (((gather, combine), dtype), ((reference.gather, reference.combine), None)):
        to = to or torch.float64
        leaves = [
            x.detach().to(to).requires_grad_(),
            weights.detach().to(torch.promote_types(to, torch.float32)).requires_grad_(),
        ]
        y = ops[1](ops[0](leaves[0], bins, 3), bins, leaves[1])
        results[to] = [y, *torch.autograd.grad(y, leaves, dy.to(to))]
    for name, g, w in zip(("y", "dx", "dw"), results[dtype], results[torch.float64], strict=True):
        assert_close(name, g, w, dtype=dtype)


def test_launches_take_turns():
    """Sizes that are 1, odd or multiples of 16, aligned or not: never another's compiled kernel."""
    for tokens, hidden, offset in (
        *((48, 64, 0), (48, 64, 1), (48, 20, 0), (1, 64, 0), (7, 64, 8)),
        *((48, 1, 3), (7, 20, 2), (48, 64, 0), (1, 20, 1), (48, 64, 5)),
    ):
        ids = make_expert_ids("uniform", tokens, 4, 2, device="cuda")
        bins = bin_tokens(ids, 4)
        flat = torch.randn(offset + tokens * hidden, device="cuda").bfloat16()
        x = flat[offset:].view(tokens, hidden)
        rows, want = (op(x, bins, 2) for op in (gather, reference.gather))
        assert torch.equal(rows, want), (tokens, hidden, offset)
        weights = torch.ones(2 * tokens + offset, device="cuda")[offset:].view(tokens, 2)
        assert torch.equal(combine(rows, bins, weights), 2 * x), (tokens, hidden, offset)


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(513, 64, 8), (100, 1, 1), (77, 512, 3)])
def test_topk_softmax(tokens, experts, k, renormalize):
    logits = torch.randn(tokens, experts, device="cuda", requires_grad=True)
    results = []
    for op in (topk_softmax, reference.topk_softmax):
        weights, ids, probs = op(logits, k, renormalize=renormalize)
        loss = (weights * weights.detach().cos()).sum() + probs.square().sum()
        results.append((weights, probs, *torch.autograd.grad(loss, logits), ids))
    for name, g, w in zip(("weights", "probs", "d_logits"), *(r[:3] for r in results), strict=True):
        assert_close(name, g, w)
    assert torch.equal(results[0][3], results[1][3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(513, 64, 8), (100, 1, 1), (77, 512, 3)])
def test_topk_ids(tokens, experts, k, dtype):
    scores = torch.randn(tokens, experts, device="cuda").round(decimals=1).to(dtype)
    scores[0] = 0
    scores[1, experts // 2 :] = -torch.inf
    scores[2, -1] = torch.nan
    assert torch.equal(topk_ids(scores, k), reference.topk_ids(scores, k))


def test_one_renormalized_weight_is_one_and_its_gradient_zero():
    logits = torch.randn(3000, 9, device="cuda", requires_grad=True)
    weights, _, _ = topk_softmax(logits, 1, renormalize=True)
    assert torch.equal(weights, torch.ones_like(weights))
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), logits)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("capacity", [None, 0, 300], ids=lambda c: f"C{c}")
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(5000, 64, 8), (1, 1, 1), (70000, 512, 4), (1023, 15, 3)]
)
def test_bin_tokens(tokens, experts, k, capacity):
    ids = make_expert_ids("skewed", tokens, experts, k, device="cuda")
    ids[::7, 0] = -1
    got, want = (op(ids, experts, capacity=capacity) for op in (bin_tokens, reference.bin_tokens))
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert torch.equal(g, w), name


NAMES = ("y", "d_logits", "dx", "dw1", "dw2")


def layer(logits, x, w1, w2, activation="swiglu", top_k=4):
    weights, ids, _ = topk_softmax(logits, top_k)
    bins = bin_tokens(ids, logits.shape[1])
    return expert_mlp(x, w1, w2, bins, weights, activation=activation)


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


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_bitwise_the_same_twice(case):
    inputs = make_inputs(case, dtype=torch.bfloat16, device="cuda")
    first, second = (
        run_expert_mlp(expert_mlp, inputs, activation=case.activation) for _ in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_saved_bytes(recompute):
    case = Case(4096, 512, 256, 16, 4)
    inputs = make_inputs(case, dtype=torch.bfloat16, device="cuda")
    arguments = [inputs[n] for n in ("x", "w1", "w2", "bins", "weights")]
    expert_mlp(*arguments, recompute=recompute)
    before = torch.cuda.memory_allocated()
    y = expert_mlp(*arguments, recompute=recompute)
    held = torch.cuda.memory_allocated() - before - y.nbytes
    h = 0 if recompute else 4 * case.ffn * case.top_k * case.tokens
    assert h <= held <= h + 2**20


def test_more_than_two_to_the_31_weight_elements():
    experts, hidden, ffn = 72, 4096, 4096  # w1: 72 · 8192 · 4096 = 2.4e9
    generator = torch.Generator(device="cuda").manual_seed(0)
    torch.use_deterministic_algorithms(False)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x = normal(256, hidden).requires_grad_()
    w1 = (normal(experts, 2 * ffn, hidden) * hidden**-0.5).requires_grad_()
    w2 = (normal(experts, hidden, ffn) * ffn**-0.5).requires_grad_()
    ids = torch.arange(256, device="cuda", dtype=torch.int32)[:, None] % experts
    ids = torch.cat([ids, (ids + experts // 2) % experts], dim=1)
    weights = torch.rand(256, 2, device="cuda", requires_grad=True)
    bins = bin_tokens(ids, experts)
    dy = normal(256, hidden)
    got = torch.autograd.grad(expert_mlp(x, w1, w2, bins, weights), (x, w1, w2, weights), dy)
    last = ids == experts - 1  # the expert whose weights lie beyond 2**31
    touched = last.any(dim=1)
    for e in (0, experts - 1):
        rows = (ids == e).nonzero()
        xe, dye = x.detach()[rows[:, 0]].double(), dy[rows[:, 0]].double()
        s = weights.detach()[rows[:, 0], rows[:, 1], None].double()
        w1e, w2e = (w.detach()[e].double().requires_grad_() for w in (w1, w2))
        gate, up = (xe @ w1e.T).chunk(2, dim=1)
        ye = s * ((torch.nn.functional.silu(gate) * up) @ w2e.T)
        want = torch.autograd.grad(ye, (w1e, w2e), dye)
        assert_close("dw1", got[1][e], want[0])
        assert_close("dw2", got[2][e], want[1])
    assert touched.any()
    assert all(torch.isfinite(g).all() for g in got)


def test_y_and_dx_beyond_two_to_the_31():
    tokens, hidden = 2**20 + 128, 2048  # x, y and dx of 2**31 elements and some more
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w1 = torch.randn(2, 32, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5
    w2 = torch.randn(2, hidden, 32, device="cuda", dtype=torch.bfloat16) / 32**0.5
    ids = torch.arange(tokens, device="cuda", dtype=torch.int32)[:, None] % 2
    weights = torch.rand(tokens, 1, device="cuda")
    torch.use_deterministic_algorithms(False)
    y = expert_mlp(x, w1, w2, bin_tokens(ids, 2), weights, activation="relu")
    last = slice(tokens - 64, tokens)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    few = x.detach()[last].double().requires_grad_()
    arguments = (w1.double(), w2.double(), bin_tokens(ids[last], 2), weights[last].double())
    want = reference.expert_mlp(few, *arguments, activation="relu")
    assert_close("y", y[last], want)
    (d_few,) = torch.autograd.grad(want, few, torch.ones_like(want))
    assert_close("dx", dx[last], d_few)


@pytest.mark.parametrize("top_k", [1, 2])
def test_opcheck(top_k):
    inputs = make_inputs(Case(40, 32, 16, 4, top_k, "skewed"), dtype=torch.bfloat16, device="cuda")
    bins = inputs["bins"]
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(
        torch.ops.mb.expert_mlp.default,
        (
            *(inputs[n] for n in ("x", "w1", "w2")),
            *(bins.order_N, bins.inverse_N, bins.offsets_E1, inputs["weights"]),
            *(None, None, [False, False], "swiglu", 16, top_k == 1),
        ),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


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


LAYERS = [layer, sparse_layer, layer_of_single_ops]


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


@pytest.mark.parametrize(("activation", "top_k"), [("geglu", 2), ("relu", 1)])
def test_a_warm_layer_compiles_nothing(activation, top_k, monkeypatch):
    sizes = {"tokens": 272, "hidden_size": 200, "ffn_hidden_size": 170, "num_experts": 8}
    more = {"top_k": top_k, "activation": activation, "renormalize": True}
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
    y = expert_mlp(x, w1, w2, bins, weights, activation=activation)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(300, 100, 83, 4, 2, "skewed", 90),
        Case(300, 17, 128, 4, 1, activation="gelu", bias=torch.float32),
        Case(70, 1, 1, 3, 2, activation=GPT_OSS, transposed=(True, True)),
        Case(4, 40, 24, 2, 1),
    ],
    ids=str,
)
def test_any_width(case, dtype):
    errors = expert_mlp_errors(case, dtype=dtype, device="cuda")
    assert max(errors.values()) <= TOLERANCES[dtype], errors


_MANY = [(7,), (0, 3), (33, 1000), (64, 4096), (), *[(96,)] * 150]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize(
    ("grad", "moment", "copy"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_adamw(grad, moment, copy, shift):
    def tensors(dtype):
        made = (torch.randn(torch.Size(shape).numel() + shift, device="cuda") for shape in _MANY)
        return [x.to(dtype)[shift:].view(shape) for x, shape in zip(made, _MANY, strict=True)]

    lists = [tensors(torch.float32), tensors(grad), *(tensors(moment) for _ in range(2))]
    lists[3] = [v.square_() for v in lists[3]]
    lists.append([None] * len(_MANY) if copy is None else tensors(copy))
    lists.append([torch.tensor(float(n), device="cuda") for n in range(len(_MANY))])
    on_cpu = [[x if x is None else x.cpu() for x in given] for given in lists]
    rates = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    for device, given in (("cuda", lists), ("cpu", on_cpu)):
        scalars = {"grad_scale": torch.ones((), device=device) * 4}
        scalars["found_inf"] = torch.zeros((), device=device)
        adamw_step(*given, **rates, **scalars)
    for got, want in zip(lists, on_cpu, strict=True):
        for a, b in zip(got, want, strict=True):
            if a is not None:  # a number in 16 bits may fall to the other side
                tolerance = 1e-5 if a.dtype is torch.float32 else 2 * torch.finfo(a.dtype).eps
                torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_sum_of_squares(dtype):
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in _MANY]
    tensors += [tensors[2].mT, tensors[3][1:, ::3], torch.ones(3, 1, device="cuda").expand(3, 7)]
    want = sum(float(x.double().square().sum()) for x in tensors)
    got = sum_of_squares(tensors)
    assert torch.equal(got, sum_of_squares(tensors))
    assert float(got) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(3, 768, 1024), (2, 129, 77), (40, 256, 64), (1, 1000, 24)])
def test_symmetric_matmul(shape, columns, dtype):
    x = torch.randn(shape, device="cuda").to(dtype)
    x = x.mT.contiguous().mT if columns else x
    gram = symmetric_matmul(x, x)
    assert_close("gram", gram, x.double() @ x.double().mT)
    gram = gram / gram.amax()
    rates = {"alpha": 0.5, "beta": -2.0, "diagonal": 3.0}
    got = symmetric_matmul(gram, gram, gram, **rates)
    assert_close("polynomial", got, reference.symmetric_matmul(*[gram.double()] * 3, **rates))
    other = symmetric_matmul(got, gram)
    assert_close("product", other, got.double() @ gram.double())
    assert torch.equal(other, symmetric_matmul(got, gram))


def test_tables_of_a_captured_step_stay_as_they_are():
    weights = [torch.randn(4096, device="cuda") for _ in range(3)]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    options |= {"grad_scale": weights[0].new_ones(()), "found_inf": weights[0].new_zeros(())}

    def state():
        moments = ([torch.zeros_like(w) for w in weights] for _ in range(2))
        steps = [w.new_zeros(()) for w in weights]
        return [[w.clone() for w in weights], weights, *moments, [None] * 3, steps]

    want, captured = state(), state()
    adamw_step(*want, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw_step(*captured, **options)
        norm = sum_of_squares(captured[0])
    # As large as the tables that went to the device: they would lie where those were, if free.
    others = [torch.full((rows, 4), 7, pin_memory=True) for rows in (3, 8) for _ in range(100)]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured[0], want[0], strict=True))
    assert torch.equal(norm, sum_of_squares(want[0]))
    assert len(others) == 200


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    inputs = make_inputs(Case(300, 128, 64, 4, 2), dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = run_expert_mlp(expert_mlp, inputs)
    with torch.cuda.device(1):
        want = run_expert_mlp(expert_mlp, inputs)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    case = Case(300, 128, 384, 4, 2)
    errors = expert_mlp_errors(case, dtype=torch.bfloat16, device="cuda:1")
    assert max(errors.values()) <= TOLERANCES[torch.bfloat16], errors

    x, w = (torch.randn(n, 64, device="cuda:1").requires_grad_() for n in (50, 32))
    labels = torch.randint(32, (50,), device="cuda:1")
    shard = VocabularyShard(0, 32, lambda statistics: statistics[None])
    want = reference.linear_cross_entropy(x, w, labels)
    for options in ({}, {"shard": shard}):
        got = linear_cross_entropy(x, w, labels, **options)
        assert_close("loss", got, want)
        pairs = zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(
            want, (x, w), retain_graph=True), strict=True)  # fmt: skip
        for g, v in pairs:
            assert_close("gradient", g, v)

    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for device in ("cpu", "cuda:1"):
        weight, m, v = (torch.zeros(40, device=device) for _ in range(3))
        lists = ([t] for t in (weight, torch.ones_like(m), m, v, None, m.new_zeros(())))
        scalars = {"grad_scale": m.new_ones(()), "found_inf": m.new_zeros(())}
        adamw_step(*lists, **scalars, **options)
        results.append(weight.cpu())
    assert_close("weight", results[1], results[0])

    zero, one = torch.zeros((), device="cuda:1"), torch.ones((), device="cuda:1")
    weight, buffer = torch.zeros(2, 40, device="cuda:1")
    rates = {"momentum": 0.5, "grad_scale": one, "found_inf": zero, "dtype": torch.float32}
    direction = muon_momentum(torch.ones_like(weight), buffer, **rates)
    muon_step(weight, direction, None, size=2.0, decay=0.0, found_inf=zero)
    assert weight.tolist() == [-1.5] * 40
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("index", [0, 1])
def test_ranks_exchange_rows_on_a_device_that_is_not_the_current_one(index):
    if torch.cuda.device_count() <= index:
        pytest.skip("needs another GPU")
    device = torch.device("cuda", index)
    layout = Layout(ranks=2, tokens=7, hidden=16, words=2, dtype=torch.bfloat16)
    arenas = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    table = torch.tensor([arena.data_ptr() for arena in arenas], device=device)
    error = torch.zeros(3, dtype=torch.int32).pin_memory()
    memories = [PeerMemory(layout, r, a, table, error, polls=1000) for r, a in enumerate(arenas)]
    with torch.cuda.device(0):
        tokens = [torch.randn(n, 16, device=device).bfloat16() for n in (7, 4)]
        peers = [torch.arange(len(x), device=device).int()[:, None] % 2 for x in tokens]
        bins = [bin_tokens(p, 2) for p in peers]
        for memory, x, b in zip(memories, tokens, bins, strict=True):
            memory.push("tokens", x, b.tokens_per_expert_E, order_N=b.order_N)
        counts = [memory.wait("tokens") for memory in memories]
        for memory, c in zip(memories, counts, strict=True):
            memory.push("home", memory.rows("tokens") * (memory.rank + 1), c)
        for memory, x, p, b in zip(memories, tokens, peers, bins, strict=True):
            memory.wait("home")
            got = memory.sum_home(memory.rows("home"), p, b.inverse_N, b.offsets_E1)
            assert torch.equal(got, x * (p + 1))
    assert not error.any()
    assert [c.tolist() for c in counts] == [[4, 2], [3, 2]]
