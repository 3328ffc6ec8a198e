"""Block-sparse products against whole dense matrices: every transpose, any topology, gradients."""

import itertools
import sys

import pytest
import torch
from mb_kernels import bin_tokens, dds, dsd, pad_bins, reference, sdd, topology
from mb_kernels.block_sparse.op import BLOCK
from mb_kernels.block_sparse.reference import make_matrix, to_dense, topology_of
from mb_kernels.runtime import registration
from mb_kernels.testing import assert_close

stk = pytest.importorskip("stk")  # the extra block-sparse

# Which blocks are nonzero.
MASKS = {
    "one_block": [[1]],
    "ragged": [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 1]],
    "empty_column": [[0, 1, 1, 0], [0, 0, 1, 0]],
    "no_block": [[0, 0], [0, 0], [0, 0]],
    "dense": [[1, 1], [1, 1], [1, 1]],
}
TRANSPOSES = list(itertools.product([False, True], repeat=2))
IDS = [f"{'t' if a else 'n'}{'t' if b else 'n'}" for a, b in TRANSPOSES]


def make_sparse(kind, *, dtype=torch.float64, index_dtype=torch.int32, spare=0, device="cpu"):
    """A Matrix with this pattern; ``spare`` blocks have storage beyond what the pattern uses."""
    mask = torch.tensor(MASKS[kind], dtype=torch.bool)
    rows, columns = mask.nonzero(as_tuple=True)
    order = (columns * mask.shape[0] + rows).argsort()
    counts, counts_t = mask.sum(1), mask.sum(0)
    zero = torch.zeros(1, dtype=torch.long)
    extra = torch.zeros(spare, dtype=torch.long)
    indices = (
        torch.cat([rows, extra]).to(index_dtype),
        torch.cat([columns, extra]).to(index_dtype),
        torch.cat([zero, counts.cumsum(0)]).int(),
        torch.cat([rows[order], extra]).to(index_dtype),
        torch.cat([zero, counts_t.cumsum(0)]).int(),
        torch.cat([order, rows.numel() + torch.arange(spare)]).int(),
    )
    data = torch.randn(rows.numel() + spare, BLOCK, BLOCK, dtype=torch.float64) / BLOCK**0.5
    data[rows.numel() :] = 0
    data = data.to(device, dtype).requires_grad_()
    size = torch.Size((mask.shape[0] * BLOCK, mask.shape[1] * BLOCK))
    return stk.Matrix(size, data, *(index.to(device) for index in indices))


def make_dense(rows, columns, transposed, *, dtype=torch.float64, device="cpu"):
    shape = (columns, rows) if transposed else (rows, columns)
    x = (torch.randn(shape, dtype=torch.float64) / BLOCK**0.5).to(device, dtype)
    x = x.requires_grad_()
    return x, (x.t() if transposed else x)


def assert_gradients(got, want, **inputs):
    leaves = inputs.values()
    for name, g, w in zip(inputs, gradients(got, leaves), gradients(want, leaves), strict=True):
        assert_close(name, g, w)


def gradients(out, inputs):
    """Gradients of a fixed projection of ``out``."""
    inputs = tuple(inputs)
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).sin()
    return torch.autograd.grad(out, inputs, direction.to(out.device, out.dtype))


@pytest.mark.parametrize("spare", [0, 2], ids=["exact", "spare"])
@pytest.mark.parametrize("transposes", TRANSPOSES, ids=IDS)
@pytest.mark.parametrize("kind", MASKS)
def test_dsd(kind, transposes, spare):
    s = make_sparse(kind, spare=spare)
    a = s.t() if transposes[0] else s
    b_leaf, b = make_dense(a.size()[1], 19, transposes[1])
    got, want = dsd(a, b), reference.dsd(a, b)
    assert_close("out", got, want)
    assert_gradients(got, want, data=s.data, b=b_leaf)


@pytest.mark.parametrize("transposes", TRANSPOSES, ids=IDS)
@pytest.mark.parametrize("kind", MASKS)
def test_dds(kind, transposes):
    s = make_sparse(kind)
    b = s.t() if transposes[1] else s
    a_leaf, a = make_dense(19, b.size()[0], transposes[0])
    got, want = dds(a, b), reference.dds(a, b)
    assert got.is_contiguous() or got.numel() == 0
    assert_close("out", got, want)
    assert_gradients(got, want, a=a_leaf, data=s.data)


@pytest.mark.parametrize("transposed_topology", [False, True], ids=["topo", "topo_t"])
@pytest.mark.parametrize("transposes", TRANSPOSES, ids=IDS)
@pytest.mark.parametrize("kind", MASKS)
def test_sdd(kind, transposes, transposed_topology):
    pattern = make_sparse(kind, spare=1)
    pattern = pattern.t() if transposed_topology else pattern
    a_leaf, a = make_dense(pattern.size()[0], 19, transposes[0])
    b_leaf, b = make_dense(19, pattern.size()[1], transposes[1])
    got, want = sdd(a, b, pattern), reference.sdd(a, b, pattern)
    assert got.size() == want.size() == pattern.size()
    assert_close("data", got.data, want.data)
    product = a.detach() @ b.detach()
    assert_close("blocks", to_dense(got), torch.where(to_dense(pattern) != 0, product, 0))
    assert_gradients(got.data, want.data, a=a_leaf, b=b_leaf)


def test_stacks_stand_for_one_matrix_under_the_other():
    s = make_sparse("ragged")  # 4 x 3 blocks
    stack = torch.randn(3, 19, BLOCK, dtype=torch.float64, requires_grad=True)  # w2 [E, D, F]
    flat = stack.detach().transpose(1, 2).reshape(-1, 19).requires_grad_()
    got, want = dsd(s, stack.transpose(1, 2)), dsd(s, flat)
    assert_close("dsd", got, want)
    (g,), (w,) = gradients(got, (stack,)), gradients(want, (flat,))
    assert g.is_contiguous()
    assert_close("dsd stack", g, w.unflatten(0, (3, BLOCK)).transpose(1, 2))

    a, _ = make_dense(4 * BLOCK, 19, False)
    got, want = sdd(a, stack, s), sdd(a, flat.t(), s)
    assert_close("sdd", got.data, want.data)
    (g,), (w,) = gradients(got.data, (stack,)), gradients(want.data, (flat,))
    assert_close("sdd stack", g, w.unflatten(0, (3, BLOCK)).transpose(1, 2))


def test_second_derivatives():
    s = make_sparse("ragged")
    a, _ = make_dense(4 * BLOCK, 2, False)
    b, _ = make_dense(2, 3 * BLOCK, False)

    def loss(a, b):
        h = sdd(a, b, s)
        return dsd(stk.Matrix(s.size(), h.data.tanh(), *s_indices(s)), b.t()).sum()

    def s_indices(s):
        first = (s.row_indices, s.column_indices, s.offsets)
        return *first, s.column_indices_t, s.offsets_t, s.block_offsets_t

    assert torch.autograd.gradgradcheck(loss, (a, b), fast_mode=True, atol=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", ["sdd", "dsd", "dsd_transposed"])
def test_op_is_sound_for_compile(op):
    s = make_sparse("ragged", dtype=torch.float32)
    indices = (s.row_indices, s.column_indices, s.offsets)
    indices += (s.offsets_t, s.column_indices_t, s.block_offsets_t)
    if op == "sdd":
        a = torch.randn(1, 4 * BLOCK, 8, requires_grad=True)
        b = torch.randn(3, 8, BLOCK, requires_grad=True)
        torch.library.opcheck(torch.ops.mb.sdd.default, (a, b, *indices))
    else:
        transposed = op == "dsd_transposed"
        b = torch.randn(1, (4 if transposed else 3) * BLOCK, 8, requires_grad=True)
        layout = (transposed, 3, True) if transposed else (transposed, 2, False)
        torch.library.opcheck(torch.ops.mb.dsd.default, (s.data, b, *indices, *layout))


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    s = make_sparse("ragged", dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        dsd(s, torch.ones(3 * BLOCK, 10))
    assert counter.get_total_flops() == 2 * 6 * BLOCK * BLOCK * 10
    with FlopCounterMode(display=False) as counter:
        sdd(torch.ones(4 * BLOCK, 10), torch.ones(10, 3 * BLOCK), s)
    assert counter.get_total_flops() == 2 * 6 * BLOCK * BLOCK * 10


def small_matrix():
    data = torch.ones(1, 64, 64)
    index = torch.zeros(1, dtype=torch.int16)
    return stk.Matrix((64, 64), data, index, index, torch.tensor([0, 1]).int())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: dsd(s, torch.ones(5, 8)), "b: expected 384, the columns of a; got 5"),
        (lambda s: dsd(s.t(), torch.ones(384, 8)), "b: expected 512, the columns of a; got 384"),
        (lambda s: dds(torch.ones(8, 5), s), "a: expected 512, the rows of b; got 5"),
        (lambda s: dds(torch.ones(2, 4, 128), s), r"a: expected \[M, K\]; got \(2, 4, 128\)"),
        (lambda s: dsd(s, torch.ones(384)), r"stack \[G, rows, columns\]; got \(384,\)"),
        (lambda s: dsd(s, torch.ones(4, 96, 8)), "multiple of 128; got 96"),
        (lambda s: dsd(s, torch.ones(384, 8).half()), "torch.float16"),
        (
            lambda s: sdd(torch.ones(512, 8), torch.ones(8, 256), s),
            "b: expected 384, the columns of the topology; got 256",
        ),
        (
            lambda s: sdd(torch.ones(384, 8), torch.ones(8, 256), s.t()),
            "b: expected 512, the columns of the topology; got 256",
        ),
        (
            lambda s: sdd(torch.ones(384, 8), torch.ones(9, 512), s.t()),
            "b: expected 8, the columns of a; got 9",
        ),
        (
            lambda s: sdd(torch.ones(512, 8), torch.ones(9, 384), s),
            "b: expected 8, the columns of a; got 9",
        ),
        (lambda _: dsd(small_matrix(), torch.ones(64, 8)), "data of 128 x 128 blocks"),
    ],
)
def test_errors_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_sparse("ragged", dtype=torch.float32))


WRONG = {
    "offsets": [0, 2, 2, 5, 9],  # of 6 blocks
    "offsets_t": [0, 2, 3, 5],
    "row_indices": [0, 0, 2, 2, 2, 4],
    "column_indices": [0, 2, 0, 1, 2, -1],
    "column_indices_t": [0, 2, 2, 0, 2, 4],
    "block_offsets_t": [0, 2, 3, 1, 4, 6],
}


@pytest.mark.parametrize("field", WRONG)
def test_debug_refuses_blocks_outside_the_matrix_or_its_storage(field, monkeypatch):
    monkeypatch.setattr(registration, "_debug", True)
    matrix = make_sparse("ragged", dtype=torch.float32)
    x = torch.zeros(3 * BLOCK, 16)
    assert not dsd(matrix, x).any()
    wrong = topology_of(matrix)._replace(**{field: torch.tensor(WRONG[field]).int()})
    matrix = make_matrix(matrix.size(), matrix.data, wrong)
    for call in (
        lambda: dsd(matrix, x),
        lambda: dds(torch.zeros(16, 4 * BLOCK), matrix),
        lambda: sdd(torch.zeros(4 * BLOCK, 16), x.t(), matrix),
    ):
        with pytest.raises(ValueError, match=rf"^{field}: expected"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposes", TRANSPOSES, ids=IDS)
@pytest.mark.parametrize("kind", ["ragged", "no_block"])
def test_kernels_on_a_gpu(kind, transposes, dtype):
    s = make_sparse(kind, dtype=dtype, index_dtype=torch.int16, spare=1, device="cuda")
    wide = make_sparse(kind, spare=1)
    wide.data.data.copy_(s.data)
    for width in (80, 256):
        a, a64 = (s.t(), wide.t()) if transposes[0] else (s, wide)
        b_leaf, b = make_dense(a.size()[1], width, transposes[1], dtype=dtype, device="cuda")
        b64_leaf = b_leaf.detach().double().cpu().requires_grad_()
        b64 = b64_leaf.t() if transposes[1] else b64_leaf
        got, want = dsd(a, b), reference.dsd(a64, b64)
        assert_close("dsd", got, want, dtype=dtype)
        names = ("data", "b")
        expected = gradients(want, (wide.data, b64_leaf))
        for name, g, w in zip(names, gradients(got, (s.data, b_leaf)), expected, strict=True):
            assert_close(f"dsd {name}", g, w, dtype=dtype)

        got, want = sdd(b, b.t(), square(a)), reference.sdd(b64, b64.t(), square(a64))
        assert_close("sdd", got.data, want.data, dtype=dtype)
        g, w = gradients(got.data, (b_leaf,)), gradients(want.data, (b64_leaf,))
        assert_close("sdd b", g[0], w[0], dtype=dtype)


def square(s):
    """A pattern of size [columns, columns] of ``s``: its diagonal."""
    blocks = s.size()[1] // BLOCK
    index = torch.arange(blocks, device=s.device, dtype=torch.int32)
    offsets = torch.arange(blocks + 1, device=s.device, dtype=torch.int32)
    data = torch.empty(1, 1, 1, dtype=s.dtype, device=s.device).expand(blocks, BLOCK, BLOCK)
    return stk.Matrix((blocks * BLOCK,) * 2, data, index, index, offsets, index, offsets, index)


@pytest.mark.gpu
def test_rows_past_32768_and_bitwise_repeatable():
    rows = 40_960  # stk multiplies 16-bit block indices and overflows from 32,768 on
    blocks = rows // BLOCK
    index = torch.arange(blocks, device="cuda", dtype=torch.int16)
    offsets = torch.arange(blocks + 1, device="cuda", dtype=torch.int32)
    data = torch.empty(blocks, BLOCK, BLOCK, device="cuda", dtype=torch.bfloat16)
    pattern = stk.Matrix((rows, rows), data, index, index, offsets, index, offsets, index.int())
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    got = sdd(x, x.t(), pattern)
    want = torch.bmm(x.view(blocks, BLOCK, 64), x.view(blocks, BLOCK, 64).transpose(1, 2))
    assert_close("data", got.data, want)
    y = dsd(got, x)
    assert_close("y", y, torch.bmm(want, x.view(blocks, BLOCK, 64)).flatten(0, 1))
    assert torch.equal(got.data, sdd(x, x.t(), pattern).data)
    assert torch.equal(y, dsd(got, x))


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.05, 0.4], ids=["few_blocks_a_row", "many_blocks_a_row"])
def test_more_tiles_than_programs(density):
    torch.manual_seed(0)
    mask = torch.rand(150, 40, device="cuda") < density
    mask[::7] = False
    mask[:, 3] = False
    rows, columns = (index.int() for index in mask.nonzero(as_tuple=True))
    order = (columns * 150 + rows).argsort()
    offsets, offsets_t = (
        torch.nn.functional.pad(mask.sum(dim).cumsum(0), (1, 0)).int() for dim in (1, 0)
    )
    data = torch.randn(rows.numel(), BLOCK, BLOCK, device="cuda", dtype=torch.bfloat16) / 16
    size = (150 * BLOCK, 40 * BLOCK)
    s = stk.Matrix(size, data, rows, columns, offsets, rows[order], offsets_t, order.int())
    dense = to_dense(s).float()
    filled = mask.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)  # some elements are zero
    for a, a_dense, inside in ((s, dense, filled), (s.t(), dense.t(), filled.t())):
        b = torch.randn(a.size()[1], 640, device="cuda", dtype=torch.bfloat16) / 16
        assert_close("dsd", dsd(a, b), a_dense @ b.float(), dtype=b.dtype)
        assert_close("dds", dds(b.t(), a.t()), b.t().float() @ a_dense.t(), dtype=b.dtype)
        c = torch.randn(640, a.size()[0], device="cuda", dtype=torch.bfloat16) / 16
        want = torch.where(inside, c.t().float() @ b.t().float(), 0)
        assert_close("sdd", to_dense(sdd(c.t(), b.t(), a)), want, dtype=b.dtype)


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    blocks = 374
    rows = blocks * BLOCK
    index = torch.arange(blocks, device="cuda", dtype=torch.int32)
    row_indices, column_indices = index.repeat_interleave(blocks), index.repeat(blocks)
    offsets = torch.arange(blocks + 1, device="cuda", dtype=torch.int32) * blocks
    storage = torch.arange(blocks * blocks, device="cuda", dtype=torch.int32)
    in_columns = storage.view(blocks, blocks).t().flatten()
    data = torch.empty(1, 1, 1, device="cuda", dtype=torch.bfloat16).expand(
        blocks * blocks, BLOCK, BLOCK
    )
    indices = (row_indices, column_indices, offsets, row_indices.view(blocks, -1).t().flatten())
    pattern = stk.Matrix((rows, rows), data, *indices, offsets, in_columns)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    got = sdd(x, x.t(), pattern)
    assert got.data.numel() > 2**31
    want = x[-BLOCK:] @ x.t()
    last_row = got.data[-blocks:].transpose(0, 1).flatten(1)
    assert_close("last row of blocks", last_row, want)
    assert_close("dsd", dsd(got, x)[-BLOCK:], want @ x)
    assert_close("dsd transposed", dsd(got.t(), x)[-BLOCK:], want @ x)


def test_without_stk_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "stk", None)
    bins = pad_bins(bin_tokens(torch.zeros(4, 1, dtype=torch.int32), 1))
    with pytest.raises(ImportError, match=r"pip install 'mb-kernels\[block-sparse\]'"):
        topology(bins, 128, dtype=torch.float32)
