"""Grouped products against a loop over rows."""

import inspect

import mb_kernels
import pytest
import torch
from mb_kernels import gmm, grouped_experts, grouped_gemm, reference
from mb_kernels.runtime import checks, registration
from mb_kernels.testing import assert_close
from torch._subclasses import FakeTensorMode

OFFSETS = {
    "ragged": [0, 3, 3, 10, 11],
    "one_expert": [0, 0, 0, 0, 11],
    "dropped_rows": [0, 2, 4, 4, 7],
    "no_rows": [0, 0, 0, 0, 0],
}


def make_case(kind, transpose_weight):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    shape = (4, 5, 6) if transpose_weight else (4, 6, 5)
    w = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, w, torch.tensor(OFFSETS[kind], dtype=torch.int32)


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["EMK", "EKM"])
@pytest.mark.parametrize("kind", OFFSETS)
def test_matches_loop_over_rows(kind, transpose_weight):
    x, w, offsets = make_case(kind, transpose_weight)
    want = torch.zeros(11, 5, dtype=torch.float64)
    for e in range(4):
        for r in range(offsets[e], offsets[e + 1]):
            want[r] = x[r] @ (w[e].T if transpose_weight else w[e])
    assert_close("y", grouped_gemm(x, w, offsets, transpose_weight=transpose_weight), want)


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["EMK", "EKM"])
@pytest.mark.parametrize("kind", OFFSETS)
def test_gradients(kind, transpose_weight):
    x, w, offsets = make_case(kind, transpose_weight)

    def product(x, w):
        return grouped_gemm(x, w, offsets, transpose_weight=transpose_weight)

    assert torch.autograd.gradcheck(product, (x, w))
    assert torch.autograd.gradgradcheck(product, (x, w), fast_mode=True)


@pytest.mark.parametrize(
    ("w", "offsets", "message"),
    [
        (torch.zeros(2, 5, 6), torch.zeros(3).int(), r"\[E, M, K\].*\(4, 5\).*\(2, 5, 6\).*=False"),
        (torch.zeros(2, 6, 5), torch.zeros(2).int(), r"offsets_E1: expected \[3\].*\(2,\)"),
        (
            torch.zeros(2, 6, 5).half(),
            torch.zeros(3).int(),
            "w: expected torch.float32.*torch.float16",
        ),
    ],
)
def test_bad_input(w, offsets, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(torch.zeros(4, 5), w, offsets)


@pytest.mark.parametrize("offsets", [[0, 3, 5], [0, 3, 2], [1, 2, 4]], ids=str)
def test_debug_refuses_offsets_that_divide_no_rows(offsets, monkeypatch):
    monkeypatch.setattr(registration, "_debug", True)
    with pytest.raises(ValueError, match=r"offsets_E1: .*end at most at 4.*got \["):
        grouped_gemm(torch.zeros(4, 16), torch.zeros(2, 16, 16), torch.tensor(offsets))


def test_a_matrix_beyond_32_bit_offsets_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "use_triton", lambda x: True)
    huge = torch.zeros(1, 1, 1).expand(1, 2**16, 2**15)
    x = torch.zeros(1, 1).expand(4, 2**15)
    with pytest.raises(ValueError, match=r"w: .*fewer than 2\*\*31 elements"):
        grouped_gemm(x, huge, torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"w: .*fewer than 2\*\*24 rows and columns; got \(16777"):
        grouped_gemm(x[:, :1], huge[:, :1, :1].expand(1, 2**24, 1), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"a, b: .*fewer than 2\*\*31 elements"):
        gmm(x, torch.zeros(1, 1).expand(4, 2**16), torch.tensor([4]), trans_a=True)


def test_gmm_has_the_signature_of_grouped_gemm():
    """As in grouped_gemm/ops.py of github.com/tgale96/grouped_gemm, commit 28257c3."""
    theirs = inspect.signature(lambda a, b, batch_sizes, trans_b=False: None)
    ours = [p.replace(annotation=p.empty) for p in inspect.signature(gmm).parameters.values()]
    assert ours[:4] == list(theirs.parameters.values())
    # What we have beyond that takes nobody's place.
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in ours[4:])


@pytest.mark.parametrize("sizes", [[0, 3, 7, 1], [0, 0, 5, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("options", [{}, {"trans_b": True}, {"trans_a": True}], ids=str)
def test_gmm_matches_a_loop(options, sizes):
    generator = torch.Generator().manual_seed(0)
    shape = {"trans_b": (4, 5, 6), "trans_a": (11, 5)}.get(*options or [None], (4, 6, 5))
    a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((11, 6), shape))
    leaves = [t.requires_grad_() for t in (a, b)]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    runs = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if options.get("trans_a"):
        want = torch.stack([a[run].T @ b[run] for run in runs])
    else:
        matrices = b.mT if options else b
        rest = a.new_zeros(11 - ends[-1], 5)  # rows that are nobody's
        want = torch.cat([*(a[run] @ matrices[e] for e, run in enumerate(runs)), rest])
    got = gmm(a, b, torch.tensor(sizes), **options)
    slope = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for name, x, y in zip(
        ("product", "d_a", "d_b"),
        (got, *torch.autograd.grad(got, leaves, slope)),
        (want, *torch.autograd.grad(want, leaves, slope)),
        strict=True,
    ):
        assert_close(name, x, y)


@pytest.mark.parametrize("module", [mb_kernels, reference], ids=["op", "twin"])
def test_gmm_of_no_experts(module):
    a, none = torch.randn(3, 4), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(module.gmm(a, torch.randn(0, 4, 5), none), torch.zeros(3, 5))
    outer = module.gmm(a, torch.randn(3, 5), none, trans_a=True)
    assert torch.equal(outer, torch.zeros(0, 4, 5))


def test_gmm_compiles_with_sizes_on_the_cpu():
    x, w, offsets = make_case("ragged", True)
    compiled = torch.compile(gmm, fullgraph=True, backend="aot_eager")
    assert_close("y", compiled(x, w, offsets.diff(), True), gmm(x, w, offsets.diff(), True))
    with pytest.raises(ValueError, match="to end at most at 11, the number of rows"):
        compiled(x, w, 2 * offsets.diff(), True)
    both = torch.func.vmap(lambda sizes: gmm(x, w, sizes, True))(offsets.diff().expand(2, 4))
    assert_close("y, twice", both, gmm(x, w, offsets.diff(), True).expand(2, -1, -1))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert gmm(x, w, mode.from_tensor(offsets.diff()), True).shape == (11, 5)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"trans_a": True, "trans_b": True}, [4], "expected one of them at most"),
        ({"trans_a": True}, [4], r"b: expected \[N, M\]"),
        ({}, [5], r"add up to at most 4, the number of rows; got \[5\]"),
        ({"b": torch.zeros(4, 16, 16)}, [2**62] * 4, "add up to at most 4,"),  # 2**64 is 0
        ({}, [0.5], "batch_sizes: expected int32 or int64"),
        ({}, [2, 2], r"batch_sizes: expected \[1\], a size for each expert's matrix; got \(2,\)"),
        ({"a": torch.zeros(4, 8)}, [4], r"b: expected \[E, K, M\] .* got a \(4, 8\) and b \(1, 16"),
        ({"a": torch.zeros(4, 8), "trans_b": True}, [4], r"b: expected \[E, M, K\]"),
        ({"a": torch.zeros(4, 16).half()}, [4], "b: expected torch.float16, the dtype of a"),
        ({"b": torch.zeros(3, 16), "trans_a": True}, [4], r"b: expected \[N, M\]"),
    ],
)
def test_gmm_refuses(options, sizes, message):
    given = {"a": torch.zeros(4, 16), "b": torch.zeros(1, 16, 16)} | options
    with pytest.raises(ValueError, match=message):
        gmm(batch_sizes=torch.tensor(sizes), **given)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([4], "expected a tensor; got a list"),
        (torch.tensor([2**32 + 4]), r"at most 4, the number of rows; got \[4294967300"),
        (torch.tensor([-1]), "sizes of at least 0"),
    ],
    ids=str,
)
def test_what_counts_no_rows_is_refused(counts, message):
    x, w = torch.zeros(4, 16), torch.zeros(1, 16, 16)
    with pytest.raises(ValueError, match=f"batch_sizes: .*{message}"):
        gmm(x, w, counts)
    with pytest.raises(ValueError, match=f"tokens_per_expert_E: .*{message}"):
        grouped_experts(x, counts, w, w, activation="silu")
