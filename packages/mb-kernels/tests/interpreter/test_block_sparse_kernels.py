"""The block-sparse kernels in Triton's interpreter: transposes, stacks, odd sizes, spare blocks."""

import pytest
import torch
from mb_kernels import bin_tokens, dds, dsd, pad_bins, reference, sdd, topology
from mb_kernels.block_sparse import kernels as sparse_kernels
from mb_kernels.block_sparse.reference import make_matrix, topology_of
from mb_kernels.runtime.plan import Plan, assume
from mb_kernels.targets import TARGETS
from mb_kernels.testing import assert_close, make_expert_ids

stk = pytest.importorskip("stk")

BLOCK = 128
MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)


def make_sparse(dtype, index_dtype=torch.int32, mask=MASK):
    """A matrix of 3 x 3 blocks with an empty row and one spare block of storage."""
    rows, columns = mask.nonzero(as_tuple=True)
    order = (columns * len(mask) + rows).argsort()
    spare = torch.zeros(1, dtype=torch.long)
    offsets = torch.cat([spare, mask.sum(1).cumsum(0)]).int()
    offsets_t = torch.cat([spare, mask.sum(0).cumsum(0)]).int()
    data = torch.randn(rows.numel() + 1, BLOCK, BLOCK) / BLOCK**0.5
    data[-1] = 0
    return stk.Matrix(
        torch.Size([n * BLOCK for n in mask.shape]),
        data.to(dtype).requires_grad_(),
        torch.cat([rows, spare]).to(index_dtype),
        torch.cat([columns, spare]).to(index_dtype),
        offsets,
        torch.cat([rows[order], spare]).to(index_dtype),
        offsets_t,
        torch.cat([order, spare]).int(),
    )


def in_float64(s):
    stored = s if s.is_contiguous() else s.t()
    data = stored.data.detach().double().requires_grad_()
    wide = make_matrix(stored.size(), data, topology_of(stored))
    return wide if s.is_contiguous() else wide.t()


def compare(got, want, got_leaves, want_leaves, dtype):
    """Outputs and gradients of a fixed projection."""
    assert_close("out", got, want, dtype=dtype)
    direction = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape).sin()
    gradients = torch.autograd.grad(got, got_leaves, direction.to(got.dtype))
    expected = torch.autograd.grad(want, want_leaves, direction)
    for i, (g, w) in enumerate(zip(gradients, expected, strict=True)):
        assert_close(f"gradient {i}", g, w, dtype=dtype)


def dense(rows, columns, transposed, dtype):
    shape = (columns, rows) if transposed else (rows, columns)
    leaf = (torch.randn(shape) / BLOCK**0.5).to(dtype).requires_grad_()
    wide = leaf.detach().double().requires_grad_()
    return (leaf, leaf.t(), wide, wide.t()) if transposed else (leaf, leaf, wide, wide)


CASES = [
    (torch.float32, False, False),
    (torch.float32, True, True),
    (torch.float16, False, True),
    (torch.bfloat16, True, False),
]


@pytest.mark.parametrize(("dtype", "trans_sparse", "trans_dense"), CASES, ids=str)
def test_dsd_and_dds(dtype, trans_sparse, trans_dense):
    s = make_sparse(dtype)
    a = s.t() if trans_sparse else s
    a64 = in_float64(a)
    leaf, b, wide, b64 = dense(3 * BLOCK, 40, trans_dense, dtype)
    compare(dsd(a, b), reference.dsd(a64, b64), (s.data, leaf), (a64.data, wide), dtype)
    leaf, b, wide, b64 = dense(24, 3 * BLOCK, trans_dense, dtype)
    compare(dds(b, a), reference.dds(b64, a64), (s.data, leaf), (a64.data, wide), dtype)


@pytest.mark.parametrize(("dtype", "trans_a", "trans_b"), CASES, ids=str)
def test_sdd(dtype, trans_a, trans_b):
    pattern = make_sparse(dtype, torch.int16)
    leaf_a, a, wide_a, a64 = dense(3 * BLOCK, 40, trans_a, dtype)
    leaf_b, b, wide_b, b64 = dense(40, 3 * BLOCK, trans_b, dtype)
    got, want = sdd(a, b, pattern).data, reference.sdd(a64, b64, pattern).data
    compare(got, want, (leaf_a, leaf_b), (wide_a, wide_b), dtype)


def test_spare_blocks_are_zeros_in_the_order_of_columns_too():
    wide = make_sparse(torch.float32, mask=MASK[[0, 2]])
    a, b = torch.randn(2 * BLOCK, 16), torch.randn(16, 3 * BLOCK)
    want = reference.sdd(a.double(), b.double(), wide).data
    assert_close("sdd", sdd(a, b, wide).data, want, dtype=torch.float32)
    assert not want[-1].any()


def test_stacked_weights_in_their_own_order():
    s = make_sparse(torch.float32)
    w2 = torch.randn(3, 32, BLOCK, requires_grad=True)  # [E, D, F]
    wide = w2.detach().double().requires_grad_()
    s64 = in_float64(s)
    got, want = dsd(s, w2.transpose(1, 2)), reference.dsd(s64, wide.transpose(1, 2))
    compare(got, want, (s.data, w2), (s64.data, wide), torch.float32)


def test_no_blocks():
    empty = torch.zeros(0, dtype=torch.int32)
    offsets = torch.zeros(3, dtype=torch.int32)
    s = stk.Matrix(
        (256, 256), torch.zeros(0, 128, 128), empty, empty, offsets, empty, offsets, empty
    )
    assert torch.equal(dsd(s, torch.ones(256, 5)), torch.zeros(256, 5))
    assert sdd(torch.ones(256, 5), torch.ones(5, 256), s).data.shape == (0, 128, 128)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "routing", "capacity"),
    [
        (0, 2, 1, "uniform", None),
        (0, 2, 1, "one_expert", 3),
        (77, 5, 2, "empty_experts", 3),
        (77, 5, 2, "uniform", None),
        (300, 9, 1, "one_expert", None),
        (300, 9, 1, "empty_experts", 3),
    ],
)
def test_indices_equal_the_reference(tokens, experts, top_k, routing, capacity):
    ids = make_expert_ids(routing, tokens, experts, top_k)
    bins = bin_tokens(ids, experts, capacity=capacity)
    got, want = pad_bins(bins), reference.pad_bins(bins)
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert torch.equal(g, w), name
    got = topology_of(topology(got, 384, dtype=torch.float16))
    want = topology_of(reference.topology(want, 384, dtype=torch.float16))
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert torch.equal(g, w), name


@pytest.fixture
def launched(monkeypatch):
    """The kernels launched, when 16 bits go through descriptors as on Hopper; two programs."""
    launch, kernels = sparse_kernels.launch, []

    def record(kernel, grid, *args, **kwargs):
        kernels.append(kernel)
        launch(kernel, grid, *args, **kwargs)

    monkeypatch.setattr(sparse_kernels, "launch", record)

    def plan(dtype):
        on_tma = dtype is not torch.float32
        return Plan(TARGETS["sm90"], dtype, 1, on_tma, False, interpreted=True)

    with assume(plan):
        yield kernels


@pytest.mark.parametrize("trans_dense", [False, True], ids=["b", "bt"])
@pytest.mark.parametrize("trans_sparse", [False, True], ids=["s", "st"])
def test_products_through_descriptors(launched, trans_sparse, trans_dense):
    dtype = torch.bfloat16 if trans_dense else torch.float16
    s = make_sparse(dtype)
    a = s.t() if trans_sparse else s
    a64 = in_float64(a)
    leaf, b, wide, b64 = dense(3 * BLOCK, 40, trans_dense, dtype)
    compare(dsd(a, b), reference.dsd(a64, b64), (s.data, leaf), (a64.data, wide), dtype)
    leaf, b, wide, b64 = dense(24, 3 * BLOCK, trans_dense, dtype)
    compare(dds(b, a), reference.dds(b64, a64), (s.data, leaf), (a64.data, wide), dtype)
    compare(sdd(b.t(), b, a).data, reference.sdd(b64.t(), b64, a64).data, (leaf,), (wide,), dtype)
    tma = (sparse_kernels.sdd_tma_kernel, sparse_kernels.dsd_tma_kernel)
    assert {id(kernel) for kernel in launched} == {id(kernel) for kernel in tma}


def test_odd_sizes_go_through_pointers(launched):
    s = make_sparse(torch.float16)
    b = (torch.randn(3 * BLOCK, 19) / BLOCK**0.5).half()  # rows of 38 bytes: not describable
    assert_close("dsd", dsd(s, b), reference.dsd(in_float64(s), b.double()), dtype=b.dtype)
    assert launched == [sparse_kernels.dsd_kernel]


def test_memory_that_a_descriptor_cannot_describe():
    x = torch.zeros(2, 256, 64, dtype=torch.bfloat16)
    windows = torch.zeros(400, dtype=torch.bfloat16).unfold(0, 64, 1)[None, :256]
    with assume(lambda dtype: Plan(TARGETS["sm90"], dtype, 3, True, False)):
        for y in (x, x.transpose(1, 2), x[:1], x[:, :, :16], x[:, ::2]):
            assert sparse_kernels._describable(y)
        for y in (
            windows,  # one stride of 1 as well as the other
            x[:, :, :1].contiguous(),  # rows of 2 bytes
            x[:1].expand(2, -1, -1),
            x[:, :1].expand(-1, 256, -1),
        ):
            assert not sparse_kernels._describable(y)
