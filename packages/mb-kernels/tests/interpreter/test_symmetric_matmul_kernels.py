"""The kernel of symmetric products against its reference, in 16 bits: fp32 has no kernel."""

from functools import partial

import pytest
import torch
from mb_kernels import reference, symmetric_matmul
from mb_kernels.runtime.plan import Plan, assume, plan_of, plan_on
from mb_kernels.runtime.recording import record
from mb_kernels.symmetric_matmul import kernels
from mb_kernels.targets import TARGETS
from mb_kernels.testing import assert_close


@pytest.fixture(params=["sm80", "sm90"])
def target(request):
    """The chip whose kernel it is: of sm90's operands and results pass through descriptors."""
    chip = TARGETS[request.param]
    with assume(lambda d: Plan(chip, d, 3, chip.descriptors, False, interpreted=True)):
        yield request.param


@pytest.mark.sweep(3)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("shape", "target", "dtype"),
    [
        ((2, 33, 65), "sm80", torch.bfloat16),
        ((1, 70, 8), "sm80", torch.float16),
        ((4, 1, 1), "sm80", torch.float16),
        ((1, 64, 32), "sm80", torch.float16),
        ((2, 40, 72), "sm90", torch.bfloat16),
        ((1, 72, 8), "sm90", torch.float16),
        ((3, 8, 64), "sm90", torch.float16),
    ],
    indirect=["target"],
)
@pytest.mark.usefixtures("target")
def test_symmetric_products(shape, dtype, columns):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    x = x.mT.contiguous().mT if columns else x
    gram = symmetric_matmul(x, x)
    assert_close("gram", gram, reference.symmetric_matmul(x.double(), x.double()))
    # Within a tile on the diagonal both numbers of a pair are computed: as NumPy rounds them.
    tile = torch.arange(shape[1]) // plan_of(x).tile("symmetric").block_m
    mirrored = tile[:, None] != tile
    assert torch.equal(gram[:, mirrored], gram.mT[:, mirrored])

    # Two polynomials of one matrix: neither is the other, their product is symmetric.
    gram = gram / gram.amax()
    rates = {"alpha": 0.5, "beta": -2.0, "diagonal": 3.0}
    other = symmetric_matmul(gram, gram, gram, **rates)
    assert_close("polynomial", other, reference.symmetric_matmul(*[gram.double()] * 3, **rates))
    for a, b in ((gram, other), (other.mT, gram)):
        got = symmetric_matmul(a, b)
        assert_close("product", got, reference.symmetric_matmul(a.double(), b.double()))


def test_what_is_above_the_diagonal_comes_from_below():
    a = torch.zeros(1, 96, 16).half()
    a[:, 40:] = 1
    b = torch.ones_like(a)
    got = symmetric_matmul(a, b)  # of 32 x 32 tiles: rows of zeros, and of 16 from the 40th on
    assert torch.equal(got[:, :32, 64:], got[:, 64:, :32].mT)
    assert got[0, 5, 90] == 16
    assert got[0, 45, 35] == 16
    assert got[0, 35, 45] == 0  # within a tile on the diagonal each number is its own


def test_what_counts_nothing_is_not_read():
    x = torch.ones(1, 40, 16).half()
    nothing = torch.full((1, 40, 40), torch.nan).half()
    for op in (symmetric_matmul, reference.symmetric_matmul):
        assert torch.equal(op(x, x, nothing, beta=0.0), op(x, x))


def test_a_product_whose_offsets_take_more_than_32_bits_is_torchs():
    def launches(size):
        x = torch.empty(1, size, 8, dtype=torch.float16, device="meta")
        with assume(partial(plan_on, torch.device("cpu"))), record() as listed:
            assert kernels.symmetric_matmul(x, x, None, 1.0, 0.0, 0.0).shape == (1, size, size)
        return len(listed)

    assert launches(46_336) == 1
    assert launches(46_344) == 0
