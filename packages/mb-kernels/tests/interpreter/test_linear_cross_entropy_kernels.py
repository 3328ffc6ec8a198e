"""The kernels of the head's cross entropy: fewer columns than a step, exactly one, and more."""

import pytest
import torch
from mb_kernels import VocabularyShard, linear_cross_entropy, reference
from mb_kernels.linear_cross_entropy import kernels
from mb_kernels.linear_cross_entropy.reference import row_gradients, row_statistics
from mb_kernels.testing import TOLERANCES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "start"), [(3, 61, 0), (2, 8192, 10), (5, 9001, 7)])
def test_rows(rows, columns, start, dtype):
    generator = torch.Generator().manual_seed(columns)
    logits = (5 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(start, start + columns, (rows,), generator=generator)
    labels[0], labels[1], labels[-1] = -100, start + columns, start + columns - 1
    weights = torch.rand(rows, generator=generator)
    weights[0] = 0
    want = row_statistics(logits, labels, start)
    torch.testing.assert_close(kernels.row_statistics(logits, labels, start), want)
    peaks, totals = want[:, 0].contiguous(), want[:, 1].log()
    arguments = (labels, peaks, totals, weights, start)
    want = row_gradients(logits.clone(), *arguments)
    got = kernels.row_gradients(logits.clone(), *arguments)
    torch.testing.assert_close(got, want, rtol=max(torch.finfo(dtype).eps, 1e-3), atol=1e-6)


@pytest.mark.parametrize("shard", [None, VocabularyShard(0, 301, lambda s: s[None])])
@pytest.mark.parametrize("size", [300.0, -3000.0])
def test_large_scores_cost_no_digits(size, shard):
    """As on a CPU, `test_linear_cross_entropy`."""
    w = (size + 3 * torch.randn(301, 16)).requires_grad_()
    labels = torch.randint(301, (16,))
    losses = linear_cross_entropy(torch.eye(16), w, labels, reduction="none", shard=shard)
    exact = torch.nn.functional.cross_entropy(w.double().T, labels, reduction="none")
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-6, atol=3e-6)
    (got,) = torch.autograd.grad(linear_cross_entropy(torch.eye(16), w, labels, shard=shard), w)
    (want,) = torch.autograd.grad(exact.mean(), w)
    torch.testing.assert_close(got, want, rtol=5e-6, atol=0)


@pytest.mark.parametrize("shard", [None, VocabularyShard(0, 9001, lambda s: s[None])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_op(dtype, shard):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(7, 16, generator=generator), torch.randn(9001, 16, generator=generator)
    labels = torch.tensor([0, -1, 9000, 8192, -100, 5, 3])
    weights = torch.rand(7, generator=generator)
    x[1], x[4], weights[4] = torch.nan, torch.inf, torch.nan
    x, w = x.bfloat16().to(dtype).requires_grad_(), w.bfloat16().float().requires_grad_()
    got = linear_cross_entropy(x, w, labels, weights, shard=shard)
    want = reference.linear_cross_entropy(x.double(), w.double(), labels, weights)
    # Logits are rounded too, of which the largest here are 16.
    tolerance = 1e-2 if dtype is torch.bfloat16 else TOLERANCES[dtype]
    torch.testing.assert_close(got, want.float(), rtol=tolerance, atol=0)
    for a, b in zip(*(torch.autograd.grad(loss, (x, w)) for loss in (got, want)), strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
    losses = linear_cross_entropy(x, w, labels, reduction="none", shard=shard)
    assert losses[1] == losses[4] == 0
