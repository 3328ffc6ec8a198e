"""The fused expert MLP: against float64 loops over slots, its gradients, compile, FLOPs, memory."""

import itertools

import pytest
import torch
from mb_kernels import bin_tokens, expert_mlp, is_glu, reference
from mb_kernels.activation import GLU_ACTIVATIONS, PLAIN_ACTIVATIONS, activate, activate_backward
from mb_kernels.expert_mlp.arguments import bounded
from mb_kernels.runtime import registration
from mb_kernels.testing import (
    GPT_OSS,
    NUMBERED,
    TOLERANCES,
    Case,
    assert_close,
    expert_mlp_errors,
    make_expert_ids,
    make_inputs,
    relative_error,
    run_expert_mlp,
)
from torch.utils.flop_counter import FlopCounterMode

CASES = [
    (13, 6, 4, 5, 2, "uniform", None),
    (9, 4, 6, 3, 1, "one_expert", None),
    (21, 5, 3, 8, 4, "empty_experts", None),
    (17, 4, 4, 4, 2, "skewed", 3),
    (0, 4, 4, 4, 2, "uniform", None),
    (6, 4, 4, 1, 1, "uniform", None),
]
IDS = ["T{}-D{}-F{}-E{}-K{}-{}-C{}".format(*case) for case in CASES]


def make_case(case, activation="swiglu", dtype=torch.float64):
    tokens, hidden, ffn, experts, top_k, routing, capacity = case
    generator = torch.Generator().manual_seed(0)
    bins = bin_tokens(
        make_expert_ids(routing, tokens, experts, top_k, generator=generator),
        experts,
        capacity=capacity,
    )

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True)

    columns = 2 * ffn if is_glu(activation) else ffn
    x, w1 = leaf(tokens, hidden), leaf(experts, columns, hidden)
    return x, w1, leaf(experts, hidden, ffn), bins, leaf(tokens, top_k)


def loop_over_slots(x, w1, w2, bins, weights, activation, b1=(0.0,) * 8, b2=(0.0,) * 8):
    """The definition, one slot at a time."""
    top_k = weights.shape[1]
    y = 0 * x
    for e in range(w1.shape[0]):
        for r in range(bins.offsets_E1[e], bins.offsets_E1[e + 1]):
            t, k = divmod(bins.order_N[r].item(), top_k)
            a = activate(w1[e] @ x[t] + b1[e], activation)
            y[t] = y[t] + weights[t, k] * (w2[e] @ a + b2[e])
    return y


def gradients(op, inputs, **kwargs):
    x, w1, w2, _, weights = inputs
    y = op(*inputs, **kwargs)
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype)
    return y, torch.autograd.grad(y, (x, w1, w2, weights), dy, allow_unused=True)


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
@pytest.mark.parametrize("op", [expert_mlp, reference.expert_mlp], ids=["op", "reference"])
def test_matches_loop_over_slots(case, recompute, op):
    inputs = make_case(case)
    want_y, want = gradients(lambda *args: loop_over_slots(*args, activation="swiglu"), inputs)
    got_y, got = gradients(op, inputs, recompute=recompute)
    assert_close("y", got_y, want_y)
    for name, g, w, like in zip(
        ("dx", "dw1", "dw2", "dweights"), got, want, (*inputs[:3], inputs[4]), strict=True
    ):
        assert_close(name, g, torch.zeros_like(like) if w is None else w)


@pytest.mark.parametrize(
    "activation", [*GLU_ACTIVATIONS, "swigluoai", *NUMBERED, *PLAIN_ACTIVATIONS]
)
def test_every_activation(activation):
    """In every memory order of the weights: the same, bit for bit, and gradients in that order."""
    for bias, *transposed in itertools.product((None, torch.float64), *[(False, True)] * 2):
        case = Case(*CASES[3], activation, bias, tuple(transposed))
        inputs = make_inputs(case, dtype=torch.float64)
        want = run_expert_mlp(reference.expert_mlp, inputs, activation=activation)
        got = run_expert_mlp(expert_mlp, inputs, activation=activation)
        for name, w in want.items():
            assert_close(name, got[name], w)
        for name, t in zip(("d_w1", "d_w2"), transposed, strict=True):
            assert (got[name].mT if t else got[name]).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_follows_float64(dtype):
    case = (40, 16, 32, 4, 2, "uniform", None)
    inputs = make_case(case)
    low = tuple(
        t.detach().to(dtype).requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs
    )
    exact = tuple(
        t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in low
    )
    want_y, want = gradients(reference.expert_mlp, exact)
    got_y, got = gradients(expert_mlp, low)
    assert_close("y", got_y, want_y)
    for name, g, w in zip(("dx", "dw1", "dw2", "dweights"), got, want, strict=True):
        assert g.dtype is dtype
        assert_close(name, g, w)


@pytest.mark.parametrize("activation", ["swigluoai", GPT_OSS])
@pytest.mark.parametrize("op", [expert_mlp, reference.expert_mlp], ids=["op", "reference"])
def test_biases_match_loop_over_slots(op, activation):
    inputs = make_inputs(Case(*CASES[3], activation, torch.float64), dtype=torch.float64)

    def loop(x, w1, w2, bins, weights, *, b1_EF, b2_ED):
        return loop_over_slots(x, w1, w2, bins, weights, activation, b1_EF, b2_ED)

    want = run_expert_mlp(loop, inputs)
    got = run_expert_mlp(op, inputs, activation=activation)
    for name, w in want.items():
        assert_close(name, got[name], w)


@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32], ids=str)
def test_biases_beside_16_bit_tokens_follow_float64(bias):
    case = Case(40, 16, 32, 4, 2, "uniform", None, "swiglu", bias)
    errors = expert_mlp_errors(case, dtype=torch.bfloat16, device="cpu")
    assert {"d_b1", "d_b2"} <= errors.keys()
    assert max(errors.values()) < TOLERANCES[torch.bfloat16], errors


def test_frozen_weights_get_no_gradient():
    x, w1, w2, bins, weights = make_case(CASES[0])
    y = expert_mlp(x, w1.detach(), w2.detach(), bins, weights.detach())
    (got,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(reference.expert_mlp(x, w1, w2, bins, weights).sum(), x)
    assert_close("dx", got, want)


def test_compiles_with_numbers_and_transposed_weights():
    x, w1, w2, bins, weights = make_case(CASES[0], dtype=torch.float32)
    w1, w2 = (w.detach().mT.contiguous().mT.requires_grad_() for w in (w1, w2))
    inputs = (x, w1, w2, bins, weights)
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    want_y, want = gradients(expert_mlp, inputs, activation=GPT_OSS)
    got_y, got = gradients(compiled, inputs, activation=GPT_OSS)
    torch.testing.assert_close(got_y, want_y, rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_compiles_without_a_graph_break(recompute):
    inputs = make_case(CASES[0], dtype=torch.float32)
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    want_y, want = gradients(expert_mlp, inputs, recompute=recompute)
    got_y, got = gradients(compiled, inputs, recompute=recompute)
    torch.testing.assert_close(got_y, want_y, rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("top_k", "max_rows"), [(1, None), (1, 12), (2, None)])
def test_opcheck(top_k, max_rows):
    case = (17, 4, 4, 4, top_k, "skewed", 3)
    x, w1, w2, bins, weights = make_case(case, dtype=torch.float32)
    if max_rows:
        bins, weights = bounded(bins, weights.detach(), max_rows)
        weights.requires_grad_()
    inputs = (x, w1, w2, bins.order_N, bins.inverse_N, bins.offsets_E1, weights)
    b1, b2 = (torch.randn(4, size).requires_grad_() for size in (8, 4))
    for biases in ((None, None), (b1, b2)):
        torch.library.opcheck(
            torch.ops.mb.expert_mlp.default,
            (*inputs, *biases, [False, False], "swiglu", 16, top_k == 1, False),
        )


def test_tokens_kept_as_rows_give_the_same_gradients():
    x, w1, w2, bins, weights = make_case((17, 4, 4, 4, 1, "skewed", 3))

    def op(keep_rows):
        indices = (bins.order_N, bins.inverse_N, bins.offsets_E1)
        inputs = (x, w1, w2, *indices, weights, None, None, [False] * 2)
        return torch.ops.mb.expert_mlp(*inputs, "swiglu", 16, keep_rows, False)[0]

    want_y, want = gradients(lambda *_: op(False), (x, w1, w2, bins, weights))
    got_y, got = gradients(lambda *_: op(True), (x, w1, w2, bins, weights))
    torch.testing.assert_close(got_y, want_y)
    torch.testing.assert_close(got, want)


def test_flops_count_both_passes():
    tokens, hidden, ffn, _, top_k = CASES[0][:5]
    inputs = make_case(CASES[0])
    with FlopCounterMode(display=False) as counter:
        gradients(expert_mlp, inputs)
    assert counter.get_total_flops() == 18 * tokens * top_k * hidden * ffn


@pytest.mark.parametrize("recompute", [False, True], ids=["save", "recompute"])
def test_saves_only_preactivations_and_maps(recompute):
    x, w1, w2, bins, weights = make_case((32, 16, 16, 4, 2, "uniform", None), dtype=torch.float32)
    given = {t.untyped_storage().data_ptr() for t in (x, w1, w2, *bins, weights)}
    saved = []

    def pack(t):
        if t.untyped_storage().data_ptr() not in given:
            saved.append(t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        expert_mlp(x, w1, w2, bins, weights, recompute=recompute)
    assert sum(saved) == (0 if recompute else 4 * 64 * 32)


def test_inference_keeps_nothing():
    x, w1, w2, bins, weights = make_case(CASES[0])
    with torch.no_grad():
        assert not expert_mlp(x, w1, w2, bins, weights).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w1": torch.zeros(5, 4, 6).double()},
            r"w1_EFD: expected \(5, 8, 6\) for swiglu.*gate over up",
        ),
        ({"w2": torch.zeros(5, 7, 4).double()}, r"w2_EDF: expected \[E, D, F\].*\(5, 7, 4\)"),
        ({"w1": torch.zeros(5, 8, 6)}, "w1_EFD: expected torch.float64"),
        ({"weights": torch.zeros(12, 2)}, r"weights_TK: expected \[13, top_k\]"),
        ({"weights": torch.zeros(13, 0)}, r"weights_TK: .*at least one choice; got \(13, 0\)"),
        ({"weights": torch.zeros(13, 3)}, "bins: expected 39 slots and 5 experts; got 26 and 5"),
        ({"activation": "swigle"}, "Use 'swiglu'"),
    ],
)
def test_bad_input(change, message):
    x, w1, w2, bins, weights = make_case(CASES[0])
    arguments = {"x": x, "w1": w1, "w2": w2, "bins": bins, "weights": weights} | change
    activation = arguments.pop("activation", "swiglu")
    with pytest.raises(ValueError, match=message):
        expert_mlp(*arguments.values(), activation=activation)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("activation", "ffn"), [("swiglu", 64), ("gelu", 64), ("gelu", 63)])
def test_quantised_saved_activations(activation, ffn, bits):
    """Output exact, gradients those of the twin, off the exact ones by what the rounding allows."""
    case = (40, 8, ffn, 5, 2, "skewed", 12)
    x, w1, w2, bins, weights = make_case(case, activation)
    d_y = torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)
    results = []
    for op, options in (
        (expert_mlp, {}),
        (expert_mlp, {"saved_activation_bits": bits}),
        (reference.expert_mlp, {"saved_activation_bits": bits}),
    ):
        y = op(x, w1, w2, bins, weights, activation=activation, **options)
        results.append((y, *torch.autograd.grad(y, (x, w1, w2, weights), d_y)))
    for name, exact, got, twin in zip(("y", "d_x", "d_w1", "d_w2", "d_w"), *results, strict=True):
        assert_close(name, got, twin)
        if name == "y":
            assert relative_error(got, exact) <= (1e-15 if ffn % 2 else 0)  # wider, to be kept
        else:
            assert 1e-4 < relative_error(got, exact) < {8: 0.02, 4: 0.2}[bits]


def test_quantised_activations_take_a_half_and_a_quarter():
    x, w1, w2, bins, weights = make_case(
        (64, 16, 256, 4, 2, "uniform", None), "swiglu", torch.bfloat16
    )

    def kept(bits):
        sizes = {}

        def pack(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            expert_mlp(x, w1, w2, bins, weights, saved_activation_bits=bits)
        return sum(sizes.values())

    h = 128 * 512 * 2
    scales = 128 * 512 // 128 * 4
    assert kept(None) - kept(8) == h - h // 2 - scales
    assert kept(None) - kept(4) == h - h // 4 - scales


@pytest.mark.sweep(2)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_quantised_activations_compile(backend):
    x, w1, w2, bins, weights = make_case((12, 4, 4, 3, 2, "uniform", None), dtype=torch.float32)

    def run(x, w1, w2, weights):
        return expert_mlp(x, w1, w2, bins, weights, saved_activation_bits=8)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    inputs = (x, w1, w2, weights)
    got, want = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (compiled, run))
    for name, a, b in zip(("x", "w1", "w2", "weights"), got, want, strict=True):
        assert_close(name, a, b)


@pytest.mark.parametrize(
    "options", [{"saved_activation_bits": 5}, {"saved_activation_bits": 8.0}, {"recompute": True}]
)
def test_quantised_activations_refuse(options):
    x, w1, w2, bins, weights = make_case(CASES[0])
    with pytest.raises(ValueError, match="saved_activation_bits: expected 4, 8 or None"):
        expert_mlp(x, w1, w2, bins, weights, **({"saved_activation_bits": 8} | options))


def test_a_number_of_rows_is_an_integer():
    with pytest.raises(ValueError, match=r"max_rows: expected an integer; got 7\.5"):
        expert_mlp(*make_case(CASES[0]), max_rows=7.5)


@pytest.mark.parametrize(
    ("addresses", "message"),
    [((1, torch.int32), "int64"), ((2, torch.int64), "each of P"), ((1, torch.int64), "kernels")],
)
def test_a_home_where_nothing_can_be_stored_is_refused(addresses, message):
    x, w1, w2, bins, weights = make_case((21, 16, 16, 3, 2, "skewed", 4))
    count, dtype = addresses
    with pytest.raises(ValueError, match=f"home_P: expected.*{message}"):
        expert_mlp(x, w1, w2, bins, weights, home_P=torch.zeros(count, dtype=dtype))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_max_rows_bounds_what_is_kept_and_changes_nothing(top_k, bias):
    case = (21, 4, 4, 3, top_k, "skewed", 4)  # at most 12 of 21 or 42 slots are computed
    x, w1, w2, bins, weights = make_case(case, dtype=torch.float32)
    biases = {"b1_EF": torch.randn(3, 8), "b2_ED": torch.randn(3, 4)} if bias else {}

    def run(**options):
        sizes = []

        def pack(tensor):
            sizes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = expert_mlp(x, w1, w2, bins, weights, **biases, **options)
        return sizes, y, torch.autograd.grad(y.square().sum(), (x, w1, w2, weights))

    _, want_y, want = run()
    sizes, y, grads = run(max_rows=12)
    assert_close("y", y, want_y)
    for name, g, w in zip(("dx", "dw1", "dw2", "dweights"), grads, want, strict=True):
        assert_close(name, g, w)
    assert (12, 8) in sizes  # the pre-activations of a GLU, F = 4
    assert (21 * top_k, 8) not in sizes


@pytest.mark.parametrize("top_k", [1, 2])
def test_more_rows_than_max_rows_are_nan_and_an_error_to_debug(top_k, monkeypatch):
    x, w1, w2, bins, weights = make_case((9, 4, 4, 3, top_k, "uniform", None))
    want = expert_mlp(x, w1, w2, bins, weights)
    for op, recompute in itertools.product((expert_mlp, reference.expert_mlp), (False, True)):
        y = op(x, w1, w2, bins, weights, max_rows=5, recompute=recompute)
        assert y.isnan().all()  # of tokens whose rows are beyond, too
        assert torch.autograd.grad(y.sum(), x)[0].isnan().all()
        y = op(x, w1, w2, bins, weights, max_rows=9 * top_k, recompute=recompute)  # all slots
        assert_close("y", y, want)
    monkeypatch.setattr(registration, "_debug", True)
    with pytest.raises(ValueError, match="to end at most at 5"):
        expert_mlp(x, w1, w2, bins, weights, max_rows=5)


def test_recompute_of_the_reference_takes_biases_and_activation_along():
    x, w1, w2, bins, weights = make_case((13, 6, 4, 5, 2, "uniform", None), activation="gelu")
    b1, b2 = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    kept, again = (
        reference.expert_mlp(
            *(x, w1, w2, bins, weights), activation="gelu", b1_EF=b1, b2_ED=b2, recompute=recompute
        )
        for recompute in (False, True)
    )
    assert torch.equal(kept, again)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_number_at_the_limit_to_the_bit_passes_its_gradient(dtype):
    h = torch.tensor([[7.0, 8.0, 1.0, 7.0], [1.0, 7.0, -7.0, -8.0]], dtype=dtype)
    a = activate(h.requires_grad_(), "swigluoai")
    (d_h,) = torch.autograd.grad(a, h, torch.ones_like(a))
    assert_close("d_h", d_h, activate_backward(torch.ones_like(a), h.detach(), "swigluoai"))
    assert (d_h != 0).tolist() == [[True, False, True, True], [True, True, True, False]]


def test_gpt_oss_s_gate_is_its_definition():
    h = torch.linspace(-20, 20, 4 * 6, dtype=torch.float64).view(4, 6)[torch.randperm(4)]
    h = h.flip(1).contiguous().requires_grad_()
    gate, up = h[:, :3].clamp(max=7), h[:, 3:].clamp(-7, 7)
    want = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    got = activate(h, "swigluoai")
    assert_close("a", got, want)
    d_a = torch.randn(4, 3, dtype=torch.float64)
    (d_h,) = torch.autograd.grad(want, h, d_a)
    assert_close("d_h", activate_backward(d_a, h.detach(), "swigluoai"), d_h)


def test_a_lost_store_of_32_bytes_is_an_error():
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(256, 4096, dtype=torch.float64, generator=generator)
    got = want.bfloat16()
    assert_close("whole", got, want)
    got[17, 32:48] = 0
    assert relative_error(got, want) < TOLERANCES[torch.bfloat16]  # the whole does not tell
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("torn", got, want)
