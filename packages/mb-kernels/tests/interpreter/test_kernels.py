"""The kernels of the expert MLP, run by Triton's interpreter."""

import dataclasses
import weakref

import pytest
import torch
from mb_kernels import (
    Bins,
    bin_tokens,
    combine,
    expert_mlp,
    gather,
    grouped_gemm,
    reference,
    topk_ids,
    topk_softmax,
)
from mb_kernels.expert_mlp import steps
from mb_kernels.runtime import registration
from mb_kernels.runtime.descriptors import matrices, ragged
from mb_kernels.runtime.plan import Plan, assume, plan_of
from mb_kernels.targets import TARGETS
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
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

CASES = [
    Case(37, 48, 32, 5, 2),
    Case(70, 32, 48, 4, 1, "skewed", None, "gelu"),
    Case(33, 32, 16, 3, 1, "uniform", 5, "reglu"),
    Case(50, 16, 16, 6, 3, "empty_experts", 9, "geglu_tanh"),
    Case(20, 16, 16, 1, 1, "uniform", None, "squared_relu"),
    Case(40, 16, 16, 4, 2, "one_expert", None, "geglu"),
    Case(0, 16, 16, 4, 2),
    Case(40, 32, 16, 3, 2, activation="swigluoai"),
    Case(25, 32, 48, 4, 3, "empty_experts", 9, "swigluoai", torch.float32),
    Case(40, 16, 48, 3, 1, "skewed", 20, "gelu", torch.float32),
    Case(37, 48, 48, 3, 2, "skewed", None, "swiglu(limit=3.5)", None, (True, True)),
    Case(25, 32, 48, 3, 3, "empty_experts", 9, GPT_OSS, torch.float32, (True, True)),
    Case(37, 16, 48, 3, 1, "uniform", None, NUMBERED[6], torch.float32, (False, True)),
    Case(20, 32, 16, 2, 2, activation="swiglu(gate_cap=1.5, up_cap=2)", transposed=(True, False)),
    Case(20, 48, 16, 2, 1, activation="gelu", transposed=(True, True)),
    Case(21, 17, 41, 3, 2, "skewed", 9, "geglu_tanh", torch.float32, (True, False)),
    Case(9, 16, 9, 2, 1, activation=GPT_OSS, bias=torch.float32),
]

# 16-bit and up to 8 rows per expert: the tiles of a decoder, here with more rows than fit one.
FEW_ROWS = [
    Case(12, 48, 32, 5, 3, "skewed"),
    Case(20, 32, 48, 4, 1, "one_expert", None, "gelu", torch.float32),
    Case(12, 32, 48, 4, 2, "skewed", None, "swigluoai", None, (True, True)),
    Case(12, 32, 48, 4, 2, "skewed", None, GPT_OSS, torch.float32, (True, True)),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty returns NaN, so that an element no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


OPERANDS = ("pointers", "descriptors", "chiplets")


@pytest.fixture(params=OPERANDS)
def operands(request):
    """Ways of loading operands and dealing tiles: sm80's, Hopper's, and AMD's with XCDs."""
    target = {"descriptors": "sm90", "chiplets": "gfx942"}.get(request.param, "sm80")
    units = 16 if request.param == "chiplets" else 3
    on_tma = request.param == "descriptors"
    with assume(lambda d: Plan(TARGETS[target], d, units, on_tma, False, interpreted=True)):
        yield


# Two runs for each case, so that any two of a case, a dtype and a way meet; all three need not.
RUNS = [
    pytest.param(case, dtype, OPERANDS[(i + way) % 3], marks=[pytest.mark.slow] * way)
    for cases, dtypes in (
        (CASES, (torch.float32, torch.float32)),
        ((CASES[0], CASES[-1], *FEW_ROWS), (torch.float16, torch.bfloat16)),
    )
    for i, case in enumerate(cases)
    for way, dtype in enumerate(dtypes)
]


@pytest.mark.sweep(3)
@pytest.mark.usefixtures("operands")
@pytest.mark.parametrize(("case", "dtype", "operands"), RUNS, ids=str, indirect=["operands"])
def test_expert_mlp(case, dtype):
    errors = expert_mlp_errors(case, dtype=dtype, device="cpu")
    assert max(errors.values()) <= TOLERANCES[dtype], errors


# In fp32 the kernels round to 8 bits exactly what the reference rounds, with chiplets to MI300's.
IN_FLOAT8 = [
    pytest.param(case, OPERANDS[i % 3], marks=pytest.mark.slow if i % 4 else ())
    for i, case in enumerate(CASES)
    if case.activation != GPT_OSS
]


@pytest.mark.usefixtures("operands")
@pytest.mark.parametrize(("case", "operands"), IN_FLOAT8, ids=str, indirect=["operands"])
def test_expert_mlp_in_float8(case):
    if "interleaved" in case.activation:
        pytest.skip("refused: see test_float8.py")
    inputs = make_inputs(case, dtype=torch.float32)
    options = {"activation": case.activation, "fp8": True}
    got, want = (run_expert_mlp(op, inputs, **options) for op in (expert_mlp, reference.expert_mlp))
    for name, value in want.items():
        assert_close(name, got[name], value)


# Any two of a top-k, a number format and a way meet in the first four.
STORED = [
    *((1, False, "pointers"), (1, True, "descriptors")),
    *((2, False, "descriptors"), (2, True, "pointers")),
    pytest.param(1, False, "descriptors", marks=pytest.mark.slow),
    pytest.param(1, True, "pointers", marks=pytest.mark.slow),
    pytest.param(2, False, "pointers", marks=pytest.mark.slow),
    pytest.param(2, True, "descriptors", marks=pytest.mark.slow),
]


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("operands")
@pytest.mark.parametrize(("top_k", "fp8", "operands"), STORED, indirect=["operands"])
def test_expert_mlp_stores_rows_where_their_tokens_came_from(top_k, fp8, reachable):
    ranks, region = 2, 11
    inputs = make_inputs(Case(ranks * region, 48, 32, 4, top_k), dtype=torch.float32)
    ids = make_expert_ids("uniform", ranks * region, 4, top_k)
    ids[0] = ids[15] = -1  # of no expert: at home the row stays what it is
    inputs["bins"] = bin_tokens(ids, 4)
    want = run_expert_mlp(reference.expert_mlp, inputs, fp8=fp8)
    memory = torch.full((ranks, region + 2, 48), 7.0)  # a row before and one behind
    reachable.append(memory)
    addresses = torch.tensor([memory[rank, 1].data_ptr() for rank in range(ranks)])

    def came():
        assert (memory[:, [0, -1]] == 7).all()
        rows = memory[:, 1:-1].flatten(0, 1).clone()
        assert (rows[[0, 15]] == 7).all()
        memory.fill_(7)
        return rows.index_fill(0, torch.tensor([0, 15]), 0)

    arguments = [inputs[n] for n in ("x", "w1", "w2", "bins", "weights")]
    y = expert_mlp(*arguments, fp8=fp8, home_P=addresses)
    assert y.isnan().all()
    assert_close("y", came(), want["y"])
    y.backward(inputs["d_y"])
    assert inputs["x"].grad.isnan().all()
    assert_close("d_x", came(), want["d_x"])
    for name in ("w1", "w2", "weights"):
        assert_close(name, inputs[name].grad, want[f"d_{name}"])


def fields(descriptor):
    names = [f.name for f in dataclasses.fields(descriptor) if f.name != "base"]
    return {name: getattr(descriptor, name) for name in names}


@pytest.mark.parametrize("parts", [None, 1, 2])
def test_descriptors_are_tritons(parts):
    x, w = torch.zeros(7, 32), torch.zeros(3, 16, 32)
    block = (16, 16) if parts is None else (16, 1, 16)
    view = x if parts is None else x.view(7, parts, -1)
    assert ragged(x, block, parts).base is x
    assert fields(ragged(x, block, parts)) == fields(create_ragged_descriptor(view, block))
    assert matrices(w, (1, 8, 16)).base is w
    want = TensorDescriptor(w, [3, 16, 32], [512, 32, 1], [1, 8, 16])
    assert fields(matrices(w, (1, 8, 16))) == fields(want)


def test_one_matrix_is_described_whatever_its_stride():
    w = torch.zeros(16, 32)
    odd = w.as_strided((1, 16, 32), (7, 32, 1))
    assert odd.is_contiguous()
    assert fields(matrices(odd, (1, 8, 16))) == fields(matrices(w[None], (1, 8, 16)))


@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_tf32_by_torch_s_own_switch(mode):
    matmul = torch.backends.cuda.matmul  # its older getters raise once this has been set
    before = matmul.fp32_precision
    matmul.fp32_precision = mode
    try:
        assert plan_of(torch.zeros(1)).precision == mode
        assert plan_of(torch.zeros(1, dtype=torch.bfloat16)).precision == "ieee"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("top_k", "bias"), [(1, None), (2, torch.float32)])
def test_max_rows_changes_nothing(top_k, bias):
    case = Case(21, 16, 16, 3, top_k, "skewed", 4, "swigluoai", bias)
    inputs = make_inputs(case, dtype=torch.float32)
    want, got = (
        run_expert_mlp(expert_mlp, inputs, activation=case.activation, max_rows=bound)
        for bound in (None, 12)
    )
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("top_k", [1, 2])
def test_more_rows_than_max_rows_are_nan_for_every_token_that_has_some(top_k):
    inputs = make_inputs(Case(21, 16, 16, 3, top_k, "uniform", 4), dtype=torch.float32)
    want = run_expert_mlp(expert_mlp, inputs, activation="swiglu")
    got = run_expert_mlp(expert_mlp, inputs, activation="swiglu", max_rows=5)
    nobody = (inputs["bins"].inverse_N.view(-1, top_k) < 0).all(1)
    assert nobody.any()
    for name in ("y", "d_x"):
        assert got[name][~nobody].isnan().all(), name
        assert torch.equal(got[name][nobody], want[name][nobody]), name


def test_experts_without_features_and_fewer_rows_than_tokens_have_gradients_of_zero():
    inputs = make_inputs(Case(21, 16, 16, 3, 1, "skewed", 4, "relu"), dtype=torch.float32)
    inputs |= {"w1": inputs["w1"][:, :0], "w2": inputs["w2"][:, :, :0]}
    got = run_expert_mlp(expert_mlp, inputs, activation="relu", max_rows=12)
    assert all(not value.any() for value in got.values()), got
    assert got["d_x"].shape == inputs["x"].shape


def test_without_experts_the_result_is_zero():
    none = torch.zeros(5, dtype=torch.int32) - 1
    bins = Bins(torch.arange(5, dtype=torch.int32), none, none[:0], torch.zeros_like(none[:1]))
    x, w1, w2 = torch.ones(5, 16), torch.empty(0, 32, 16), torch.empty(0, 16, 16)
    assert not expert_mlp(x, w1, w2, bins, torch.ones(5, 1)).any()


@pytest.mark.parametrize("on_tma", [False, True], ids=["pointers", "descriptors"])
def test_programs_that_leave_early_change_nothing(on_tma):
    plan = Plan(TARGETS["sm90"], torch.float32, 3, on_tma, False, interpreted=True)
    short = dataclasses.replace(plan, tiles_per_program=2)
    tile = plan.tile("down")
    assert plan.programs(100, tile) == 3
    assert [short.programs(items, tile) for items in (0, 6, 7, 13)] == [3, 3, 6, 9]
    inputs = make_inputs(CASES[0], dtype=torch.float32)
    results = []
    for each in (plan, short):
        with assume(lambda dtype, each=each: each):
            results.append(run_expert_mlp(expert_mlp, inputs))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_recompute_changes_nothing():
    inputs = make_inputs(CASES[0], dtype=torch.float32)
    saved, recomputed = (
        run_expert_mlp(expert_mlp, inputs, recompute=flag) for flag in (False, True)
    )
    for name, value in saved.items():
        assert torch.equal(value, recomputed[name]), name


def test_activations_that_come_with_recomputed_h_are_let_go(monkeypatch):
    """The backward takes the memory of as many again right after."""
    made = []
    up, dact = steps.up, steps.dact

    def watched_up(*args, **options):
        h, a = up(*args, **options)
        made.append(weakref.ref(a))
        return h, a

    def watched_dact(*args, **options):
        assert [a() for a in made] == [None, None]
        return dact(*args, **options)

    monkeypatch.setattr(steps, "up", watched_up)
    monkeypatch.setattr(steps, "dact", watched_dact)
    run_expert_mlp(expert_mlp, make_inputs(CASES[0], dtype=torch.float32), recompute=True)
    assert len(made) == 2  # forward and backward


@pytest.mark.usefixtures("operands")
@pytest.mark.parametrize("operands", OPERANDS[:2], indirect=True)
def test_unaligned_weights_are_copied():
    inputs = make_inputs(CASES[5], dtype=torch.float32)
    want = run_expert_mlp(expert_mlp, inputs, activation="geglu")
    for name in ("w1", "w2"):
        flat = torch.cat([torch.zeros(1), inputs[name].detach().flatten()])
        inputs[name] = flat[1:].view_as(inputs[name]).requires_grad_()
        assert inputs[name].data_ptr() % 16
    got = run_expert_mlp(expert_mlp, inputs, activation="geglu")
    for name, value in want.items():
        assert torch.equal(value, got[name]), name


@pytest.mark.usefixtures("operands")
@pytest.mark.parametrize("transpose_weight", [True, False], ids=["EMK", "EKM"])
@pytest.mark.parametrize(
    ("offsets", "dtype"),
    [([0, 0, 33, 33, 50], torch.float32), ([0, 10, 12, 12, 13], torch.bfloat16)],
    ids=str,
)
def test_grouped_gemm(offsets, dtype, transpose_weight):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 48, generator=generator).to(dtype)
    w = torch.randn((4, 32, 48) if transpose_weight else (4, 48, 32), generator=generator).to(dtype)
    dy = torch.randn(50, 32, generator=generator).to(dtype)
    x[offsets[-1] :] = float("nan")  # rows of no expert are never used
    offsets = torch.tensor(offsets, dtype=torch.int32)
    results = []
    for op, to in ((grouped_gemm, dtype), (reference.grouped_gemm, torch.float64)):
        leaves = [t.to(to).requires_grad_() for t in (x, w)]
        y = op(*leaves, offsets, transpose_weight=transpose_weight)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(to))])
    for name, got, want in zip(("y", "dx", "dw"), *results, strict=True):
        assert_close(name, got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capacity", [None, 4])
def test_gather_and_combine(capacity, dtype):
    ids = make_expert_ids("skewed", 21, 5, 3, generator=torch.Generator().manual_seed(0))
    bins = bin_tokens(ids, 5, capacity=capacity)
    x, dy = torch.randn(2, 21, 20).to(dtype)
    weights = torch.rand(21, 3).to(dtype)
    results = []
    for ops, to in (
        ((gather, combine), dtype),
        ((reference.gather, reference.combine), torch.float64),
    ):
        leaves = [t.to(to).requires_grad_() for t in (x, weights)]
        y = ops[1](ops[0](leaves[0], bins, 3), bins, leaves[1])
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(to))])
    for name, got, want in zip(("y", "dx", "dw"), *results, strict=True):
        assert_close(name, got, want)


@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "dtype"),
    [
        (33, 7, 3, torch.float32),
        (5, 1, 1, torch.float32),
        (9, 64, 8, torch.float32),
        (33, 7, 3, torch.bfloat16),
    ],
)
def test_topk_softmax(tokens, experts, k, dtype, renormalize):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, experts, generator=generator).round(decimals=1)  # some ties
    logits = logits.to(dtype)
    logits.requires_grad_()
    results = []
    for op in (topk_softmax, reference.topk_softmax):
        weights, ids, probs = op(logits, k, renormalize=renormalize)
        loss = (weights * weights.detach().cos()).sum() + probs.square().sum()
        results.append((weights, probs, *torch.autograd.grad(loss, logits), ids))
    for name, got, want in zip(
        ("weights", "probs", "d_logits"), *(r[:3] for r in results), strict=True
    ):
        assert_close(name, got, want)
    assert torch.equal(results[0][3], results[1][3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(33, 7, 3), (5, 1, 1), (9, 64, 8), (3, 6, 6), (2, 300, 2)]
)
def test_topk_ids(tokens, experts, k, dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(tokens, experts, generator=generator).round(decimals=1).to(dtype)
    scores[0] = torch.tensor([0.0, -0.0]).repeat(experts)[:experts]  # all equal
    scores[1, experts // 2 :] = -torch.inf  # of closed groups
    scores[-1, -1] = torch.nan
    assert torch.equal(topk_ids(scores, k), reference.topk_ids(scores, k))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "routing", "capacity"),
    [
        (300, 40, 2, "skewed", 9),
        (300, 40, 2, "empty_experts", None),
        (1, 2, 1, "skewed", None),
        (1, 2, 1, "empty_experts", 0),
        (64, 3, 1, "skewed", 0),
        (64, 3, 1, "empty_experts", 9),
    ],
)
def test_bin_tokens(tokens, experts, k, routing, capacity):
    generator = torch.Generator().manual_seed(0)
    ids = make_expert_ids(routing, tokens, experts, k, generator=generator).long()
    nobody = torch.tensor([-1, experts, 2**40])
    ids[3::7, 0] = nobody[torch.arange(len(ids[3::7])) % 3]
    got, want = (op(ids, experts, capacity=capacity) for op in (bin_tokens, reference.bin_tokens))
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert torch.equal(g, w), name


def test_debug_looks_at_the_offsets_of_results_that_go_home(monkeypatch):
    monkeypatch.setattr(registration, "_debug", True)
    inputs = make_inputs(Case(4, 16, 16, 2, 1), dtype=torch.float32)
    bins = inputs["bins"]._replace(offsets_E1=torch.tensor([0, 3, 2]))
    home = torch.zeros(4, 16)
    addresses = torch.tensor([home.data_ptr()])
    arguments = (inputs["x"], inputs["w1"], inputs["w2"], bins, inputs["weights"])
    with pytest.raises(ValueError, match="offsets_E1: expected to start at 0, never to fall"):
        expert_mlp(*arguments, home_P=addresses)
