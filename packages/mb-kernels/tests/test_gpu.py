"""The Triton kernels on a GPU in every dtype, against float64; sizes, bytes, determinism."""

from dataclasses import replace

import pytest
import torch
from every_op import ON_A_GPU
from mb_kernels import (
    bin_tokens,
    combine,
    expert_mlp,
    gather,
    grouped_gemm,
    reference,
    topk_ids,
    topk_softmax,
)
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS
from mb_kernels.runtime.plan import assume, plan_of
from mb_kernels.targets import current_target
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

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("poisoned_memory")]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_expert_mlp(case, dtype):
    errors = expert_mlp_errors(case, dtype=dtype, device="cuda")
    assert max(errors.values()) <= TOLERANCES[dtype], errors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_portable_kernels_where_hopper_has_its_own(case):
    plan = replace(plan_of(torch.empty(0, dtype=torch.bfloat16, device="cuda")), specialized=False)
    with (
        assume(lambda dtype: plan if dtype is torch.bfloat16 else replace(plan, dtype=dtype)),
        torch.autograd.set_multithreading_enabled(False),  # the backward pass, too, is to assume it
    ):
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


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_opcheck(top_k, fp8):
    if fp8 and current_target().float8 is None:
        pytest.skip("this GPU has no products in 8-bit floats")
    inputs = make_inputs(Case(40, 32, 16, 4, top_k, "skewed"), dtype=torch.bfloat16, device="cuda")
    bins = inputs["bins"]
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(
        torch.ops.mb.expert_mlp.default,
        (
            *(inputs[n] for n in ("x", "w1", "w2")),
            *(bins.order_N, bins.inverse_N, bins.offsets_E1, inputs["weights"]),
            *(None, None, [False, False], "swiglu", 16, top_k == 1, fp8),
        ),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


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
