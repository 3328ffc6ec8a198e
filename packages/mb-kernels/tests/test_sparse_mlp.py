"""The block-sparse expert MLP equals the grouped one; its indices describe what they should."""

import pytest
import torch
from mb_kernels import bin_tokens, expert_mlp, pad_bins, reference, sparse_expert_mlp, topology
from mb_kernels.activation import is_glu
from mb_kernels.block_sparse.mlp_reference import padded_rows
from mb_kernels.block_sparse.reference import BLOCK, make_matrix, to_dense, topology_of
from mb_kernels.runtime import registration
from mb_kernels.testing import (
    ROUTINGS,
    Case,
    assert_close,
    make_expert_ids,
    make_inputs,
    run_expert_mlp,
)

pytest.importorskip("stk")  # the extra block-sparse

SIZES = [(7, 3, 2), (1, 4, 1), (0, 2, 1), (150, 5, 3)]  # tokens, experts, top_k


def make_bins(routing, tokens, experts, top_k, capacity=None):
    generator = torch.Generator().manual_seed(tokens)
    ids = make_expert_ids(routing, tokens, experts, top_k, generator=generator)
    return bin_tokens(ids, experts, capacity=capacity)


@pytest.mark.parametrize("capacity", [None, 2], ids=["dropless", "capacity"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES, ids=str)
def test_padded_bins_hold_the_same_slots(tokens, experts, top_k, routing, capacity):
    bins = make_bins(routing, tokens, experts, top_k, capacity)
    padded = pad_bins(bins)
    assert padded.order_N.numel() == padded_rows(tokens * top_k, experts)
    assert (padded.offsets_E1 % BLOCK == 0).all()
    assert padded.offsets_E1[-1] <= padded.order_N.numel()
    for e in range(experts):
        start, end = bins.offsets_E1[e], bins.offsets_E1[e + 1]
        first = padded.offsets_E1[e]
        mine = padded.order_N[first : padded.offsets_E1[e + 1]]
        assert torch.equal(mine[: end - start], bins.order_N[start:end])
        assert (mine[end - start :] == -1).all()
        assert mine.numel() - (end - start) < BLOCK
    kept = bins.inverse_N >= 0
    tail = padded.order_N[padded.offsets_E1[-1] :]
    dropped = int((~kept).sum())
    assert torch.equal(tail[:dropped], bins.order_N[bins.offsets_E1[-1] :])
    assert (tail[dropped:] == -1).all()
    assert torch.equal(padded.inverse_N >= 0, kept)
    slots = padded.order_N[padded.inverse_N[kept].long()]
    assert torch.equal(slots, kept.nonzero()[:, 0].int())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES, ids=str)
def test_topology_gives_every_expert_its_own_columns(tokens, experts, top_k, routing):
    padded = pad_bins(make_bins(routing, tokens, experts, top_k))
    pattern = topology(padded, 2 * BLOCK, dtype=torch.float32)
    rows, columns = pattern.size()
    want = torch.zeros(rows, columns)
    for e in range(experts):
        own = slice(2 * BLOCK * e, 2 * BLOCK * (e + 1))
        want[padded.offsets_E1[e] : padded.offsets_E1[e + 1], own] = 1
    # Each block's storage index in its elements: data order, and the transposed order of it.
    t = topology_of(pattern)
    used = int(t.offsets[-1])
    ones = torch.ones(t.row_indices.numel(), BLOCK, BLOCK)
    matrix = make_matrix((rows, columns), ones, t)
    assert torch.equal(to_dense(matrix), want)
    in_order = t.block_offsets_t.long()
    assert torch.equal(in_order.sort().values, torch.arange(in_order.numel()))
    assert torch.equal(t.row_indices[in_order[:used]], t.column_indices_t[:used])
    by_column = t.column_indices[in_order[:used]]
    assert torch.equal(by_column, by_column.sort().values)
    counts = torch.bincount(by_column, minlength=columns // BLOCK)
    assert torch.equal(t.offsets_t.diff(), counts.int())
    assert pattern.data.untyped_storage().nbytes() == 4


@pytest.mark.sweep(2)
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "gelu", "squared_relu"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES, ids=str)
def test_equals_the_grouped_route(tokens, experts, top_k, routing, activation, recompute):
    bins = make_bins(routing, tokens, experts, top_k)
    columns = BLOCK * (2 if is_glu(activation) else 1)
    # Of one token the gradient of weights is one number, which a draw may bring close to zero.
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 16), (experts, columns, 16), (experts, 16, BLOCK), (tokens, top_k))
    x, w1, w2, weights = leaves = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    got = sparse_expert_mlp(x, w1, w2, bins, weights, activation=activation, recompute=recompute)
    want = reference.expert_mlp(x, w1, w2, bins, weights, activation=activation)
    assert_close("y", got, want)
    direction = torch.randn(want.shape, dtype=want.dtype, generator=generator)
    gradients = torch.autograd.grad(got, leaves, direction)
    expected = torch.autograd.grad(want, leaves, direction)
    names = ("x", "w1", "w2", "weights")
    for name, g, w in zip(names, gradients, expected, strict=True):
        assert_close(name, g, w)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_recomputed_in_vmap_too():
    bins = make_bins("uniform", 30, 3, 2)
    w1, w2 = (torch.randn(s, requires_grad=True) for s in ((3, 2 * BLOCK, 16), (3, 16, BLOCK)))
    x, weights = torch.randn(2, 30, 16), torch.rand(30, 2)

    def mlp(x, recompute):
        return sparse_expert_mlp(x, w1, w2, bins, weights, recompute=recompute)

    got = torch.func.vmap(lambda x: mlp(x, True))(x)
    want = torch.stack([mlp(one, False) for one in x])
    grads = (torch.autograd.grad(y.square().sum(), (w1, w2)) for y in (got, want))
    for name, g, w in zip(("w1", "w2"), *grads, strict=True):
        assert_close(name, g, w)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_compiles_without_a_graph_break(activation):
    bins = make_bins("uniform", 30, 3, 2)
    w1 = torch.randn(3, BLOCK * (2 if is_glu(activation) else 1), 16, requires_grad=True)
    leaves = (torch.randn(30, 16, requires_grad=True), w1, torch.randn(3, 16, BLOCK))

    def loss(x, w1, w2):
        weights = torch.ones(30, 2)
        return sparse_expert_mlp(x, w1, w2, bins, weights, activation=activation).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves[:2])
    want = torch.autograd.grad(loss(*leaves), leaves[:2])
    for name, g, w in zip(("x", "w1"), got, want, strict=True):
        assert_close(name, g, w)


@pytest.mark.parametrize(
    ("ffn", "w1_shape", "message"),
    [
        (96, (2, 192, 16), "F of w2_EDF: expected a multiple of 128.*got 96"),
        (128, (2, 128, 16), r"w1_EFD: expected \(2, 256, 16\) for swiglu"),
    ],
)
def test_errors_say_what_was_expected(ffn, w1_shape, message):
    bins = make_bins("uniform", 4, 2, 1)
    x, w1, w2 = torch.ones(4, 16), torch.ones(w1_shape), torch.ones(2, 16, ffn)
    with pytest.raises(ValueError, match=message):
        sparse_expert_mlp(x, w1, w2, bins, torch.ones(4, 1))


def test_gates_between_the_rows_of_up_are_refused():
    bins = make_bins("uniform", 4, 2, 1)
    x, w1, w2 = torch.ones(4, 16), torch.ones(2, 256, 16), torch.ones(2, 16, 128)
    with pytest.raises(ValueError, match="gate lies over up"):
        sparse_expert_mlp(x, w1, w2, bins, torch.ones(4, 1), activation="swiglu(interleaved)")


@pytest.mark.parametrize("activation", ["swiglu(limit=0.5)", "swiglu(gate_cap=1.5, up_cap=2)"])
def test_activations_with_numbers(activation):
    inputs = make_inputs(Case(20, 16, 128, 3, 2, activation=activation), dtype=torch.float64)
    got, want = (
        run_expert_mlp(op, inputs, activation=activation) for op in (sparse_expert_mlp, expert_mlp)
    )
    for name, w in want.items():
        assert_close(name, got[name], w)


@pytest.mark.parametrize(
    ("tokens", "experts", "message"),
    [(5, 2, "expected 4 slots and 2 experts; got 5 and 2"), (4, 3, "2 experts; got 4 and 3")],
)
def test_bins_of_another_routing_are_refused(tokens, experts, message):
    bins = make_bins("uniform", tokens, experts, 1)
    x, w1, w2 = torch.ones(4, 16), torch.ones(2, 128, 16), torch.ones(2, 16, 128)
    with pytest.raises(ValueError, match=message):
        sparse_expert_mlp(x, w1, w2, bins, torch.ones(4, 1), activation="gelu")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("w2", torch.ones(2, 32, 128), r"w2_EDF: expected \[E, D, F\] with the D of x_TD"),
        ("x", torch.ones(4, 1, 16), r"w2_EDF: expected .*with the D of x_TD \[T, D\] \(4, 1, 16\)"),
        ("weights", torch.ones(4), r"weights_TK: expected \[4, top_k\].*got \(4,\)"),
        ("weights", torch.ones(4, 1, 1), r"weights_TK: expected \[4, top_k\].*got \(4, 1, 1\)"),
    ],
)
def test_what_expert_mlp_refuses_is_refused(name, given, message):
    tensors = {"x": torch.ones(4, 16), "w1": torch.ones(2, 256, 16), "w2": torch.ones(2, 16, 128)}
    tensors |= {"bins": make_bins("uniform", 4, 2, 1), "weights": torch.ones(4, 1), name: given}
    for op in (sparse_expert_mlp, expert_mlp):
        with pytest.raises(ValueError, match=message):
            op(*tensors.values())


def test_experts_without_features_give_zeros():
    x = torch.ones(4, 16, requires_grad=True)
    bins, w1, w2 = make_bins("uniform", 4, 2, 1), torch.ones(2, 0, 16), torch.ones(2, 16, 0)
    y = sparse_expert_mlp(x, w1, w2, bins, torch.ones(4, 1))
    assert not y.any()
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_bins_are_padded_once():
    bins = pad_bins(make_bins("uniform", 4, 2, 1))
    with pytest.raises(ValueError, match=r"a row for each of 4 slots.*got 384 rows.*not padded"):
        pad_bins(bins)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("offsets", [[0, 3, 5], [0, 3, 2], [1, 2, 4]], ids=str)
def test_offsets_that_divide_no_rows_are_refused(offsets, debug, monkeypatch):
    bins = make_bins("uniform", 4, 2, 1)._replace(offsets_E1=torch.tensor(offsets).int())
    if debug:  # as on a GPU, where the reference does not run
        monkeypatch.setattr(registration, "_debug", True)
        monkeypatch.setattr(registration, "use_triton", lambda x: pytest.fail("not checked"))
    x, w1, w2 = torch.ones(4, 16), torch.ones(2, 128, 16), torch.ones(2, 16, 128)
    with pytest.raises(ValueError, match=r"offsets_E1: .*end at most at 4.*got \["):
        sparse_expert_mlp(x, w1, w2, bins, torch.ones(4, 1), activation="gelu")


@pytest.mark.parametrize("tokens", [4, BLOCK])
def test_topology_wants_padded_bins(tokens):
    bins = make_bins("uniform", tokens, 2, 1)
    with pytest.raises(ValueError, match=r"Pass pad_bins\(bins\)"):
        topology(bins, 128, dtype=torch.float32)


def test_debug_refuses_a_topology_of_offsets_that_divide_no_rows(monkeypatch):
    offsets = torch.tensor([0, BLOCK, 4 * BLOCK]).int()
    bins = pad_bins(make_bins("uniform", 4, 2, 1))._replace(offsets_E1=offsets)
    monkeypatch.setattr(registration, "_debug", True)
    with pytest.raises(ValueError, match=r"offsets_E1: .*end at most at 384.*got \[0, 128, 512\]"):
        topology(bins, 128, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capacity", [None, 150], ids=["dropless", "capacity"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_kernels_on_a_gpu(routing, activation, capacity, dtype):
    tokens, experts, top_k, hidden, ffn = 333, 5, 2, 144, 256
    bins = make_bins(routing, tokens, experts, top_k, capacity)
    columns = ffn * (2 if is_glu(activation) else 1)
    shapes = ((tokens, hidden), (experts, columns, hidden), (experts, hidden, ffn), (tokens, top_k))
    scales = (1, hidden**-0.5, ffn**-0.5, 1)
    leaves = [torch.randn(shape) * scale for shape, scale in zip(shapes, scales, strict=True)]
    leaves = [leaf.to(dtype) for leaf in leaves[:3]] + leaves[3:]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.cuda().requires_grad_() for leaf in leaves]
    want = reference.expert_mlp(*wide[:3], bins, wide[3], activation=activation)
    on_gpu = type(bins)(*(t.cuda() for t in bins))
    got = sparse_expert_mlp(*leaves[:3], on_gpu, leaves[3], activation=activation)
    assert_close("y", got, want, dtype=dtype)
    direction = torch.randn_like(want)
    gradients = torch.autograd.grad(got, leaves, direction.to(got.device, got.dtype))
    expected = torch.autograd.grad(want, wide, direction)
    for name, g, w in zip(("x", "w1", "w2", "weights"), gradients, expected, strict=True):
        assert_close(name, g, w, dtype=dtype)


@pytest.mark.gpu
def test_the_host_never_waits():
    bins = make_bins("skewed", 300, 4, 2)
    bins = type(bins)(*(t.cuda() for t in bins))
    x = torch.randn(300, 64, device="cuda", requires_grad=True)
    w1 = torch.randn(4, 256, 64, device="cuda", requires_grad=True)
    w2 = torch.randn(4, 64, 128, device="cuda", requires_grad=True)
    weights = torch.ones(300, 2, device="cuda")

    def step():
        y = sparse_expert_mlp(x, w1, w2, bins, weights)
        torch.autograd.grad(y, (x, w1, w2), torch.ones_like(y))

    step()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
