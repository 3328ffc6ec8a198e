"""Kernels of the optimizers on a GPU, against their twins."""

import pytest
import torch
from every_op import ON_A_GPU
from mb_kernels import (
    accumulate_grad,
    adamw_step,
    reference,
    sum_of_squares,
    symmetric_matmul,
)
from mb_kernels.testing import assert_close

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("poisoned_memory")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
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


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "anywhere"])
@pytest.mark.parametrize("total", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_grad(total, dtype, shift):
    for shape in _MANY[:5]:
        numbers = torch.Size(shape).numel() + shift
        before, grad = (
            torch.randn(numbers, device="cuda").to(kind)[shift:].view(shape)
            for kind in (total, dtype)
        )
        want = before.double() + grad.double()
        got = accumulate_grad(before, grad)
        assert (got is before) == (total is torch.float32)
        torch.testing.assert_close(got, want.float(), rtol=0, atol=0)


def test_accumulate_grad_beyond_2_gib():
    total = torch.ones(2**31 + 8, device="cuda")
    accumulate_grad(total, torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(2**31 + 8))
    accumulate_grad(total, torch.full_like(total, 2.0, dtype=torch.bfloat16))
    assert total[-1] == 4.0
    assert total.sum(dtype=torch.float64) == 4.0 * (2**31 + 8)


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
