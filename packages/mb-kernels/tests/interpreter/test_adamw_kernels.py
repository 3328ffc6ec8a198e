"""The optimizers' kernels, and that of their norm, in Triton's interpreter against their twins."""

import contextlib

import mb_kernels
import pytest
import torch
from mb_kernels import reference
from mb_kernels.muon import op as muon
from mb_kernels.runtime import tables

# The eps is one that shows: 1e-8 could be left out.
HYPER = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-2, "weight_decay": 0.1}
# Odd, empty, of several blocks, a scalar.
SHAPES = [(7,), (0, 3), (33, 100), (4_160,), (5, 16), ()]


def _state(shapes, *, grad=torch.float32, moment=torch.float32, copy=None, shift=0):
    """Lists for the op; `shift` elements before each tensor take it off its alignment."""
    generator = torch.Generator().manual_seed(3)

    def tensor(shape, dtype):
        numel = torch.Size(shape).numel()
        values = torch.randn(numel + shift, generator=generator).to(dtype)
        return values[shift:].view(shape)

    weights = [tensor(shape, torch.float32) for shape in shapes]
    grads = [tensor(shape, grad) for shape in shapes]
    first = [tensor(shape, moment) for shape in shapes]
    second = [tensor(shape, moment).square_() for shape in shapes]
    copies = [None if copy is None else torch.empty(s, dtype=copy) for s in shapes]
    steps = [torch.tensor(float(i)) for i in range(len(shapes))]
    return weights, grads, first, second, copies, steps


def _both(reachable, shapes=SHAPES, found_inf=0.0, **options):
    results = []
    for step in (mb_kernels.adamw_step, reference.adamw_step):
        lists = _state(shapes, **options)
        reachable[:] = [t for tensors in lists for t in tensors if t is not None]
        flags = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(found_inf)}
        step(*lists, **HYPER, **flags)
        results.append(lists)
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad": torch.float16, "copy": torch.float16},
        {"shift": 1, "copy": torch.float16},
        {"grad": torch.bfloat16, "moment": torch.bfloat16, "copy": torch.bfloat16},
    ],
    ids=["fp32", "fp16-grad-copy", "unaligned", "bf16"],
)
def test_equal_to_the_reference(reachable, options):
    got, want = _both(reachable, **options)
    for name, ours, theirs in zip(
        ("weight", "grad", "m", "v", "copy", "step"), got, want, strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            if a is None:
                continue
            # A number in bf16 or fp16 may fall to the other side by the last bit of its fp32.
            tolerance = 1e-6 if a.dtype is torch.float32 else torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-7, msg=lambda m, n=name: n + m)
            if a.dtype is torch.bfloat16:
                assert (a != b).float().mean() < 1e-3 or a.numel() == 0


def test_an_infinity_changes_nothing(reachable):
    (got, _), untouched = (
        _both(reachable, found_inf=1.0, shapes=[(9,), (4, 40)]),
        _state([(9,), (4, 40)]),
    )
    for ours, before in zip(got, untouched, strict=True):
        for a, b in zip(ours, before, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_a_bf16_moment_of_a_gpus_nan_is_nan(reachable):
    lists = _state([(9,)], moment=torch.bfloat16)
    lists[1][0].view(torch.int32).fill_(0x7FFFFFFF)
    reachable[:] = [t for tensors in lists for t in tensors if t is not None]
    flags = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    mb_kernels.adamw_step(*lists, **HYPER, **flags)
    for name, (x,) in zip(("weight", "m", "v"), (lists[0], lists[2], lists[3]), strict=True):
        assert x.isnan().all(), name


def test_more_tensors_than_one_launch_takes(reachable, monkeypatch):
    monkeypatch.setattr(tables, "TENSORS", 4)
    got, want = _both(reachable, shapes=[(3,)] * 9)
    torch.testing.assert_close(torch.stack(got[0]), torch.stack(want[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "anywhere"])
def test_sum_of_squares(reachable, monkeypatch, shift, dtype):
    monkeypatch.setattr(tables, "TENSORS", 4)
    generator = torch.Generator().manual_seed(3)
    tensors = []
    for shape in (*SHAPES, (16_384,), (40_000,)):
        numbers = torch.randn(torch.Size(shape).numel() + shift, generator=generator).to(dtype)
        tensors.append(numbers[shift:].view(shape))
    tensors += [tensors[2].mT, torch.randn(9, dtype=torch.float64, generator=generator)]
    want = sum(float(x.double().square().sum()) for x in tensors)
    reachable[:] = tensors
    assert float(mb_kernels.sum_of_squares(tensors)) == pytest.approx(want, rel=1e-6)
    for bad in (torch.nan, torch.inf):
        tensors[3][-1] = bad
        got = float(mb_kernels.sum_of_squares(tensors))
        assert got == pytest.approx(bad, nan_ok=True)
    assert float(mb_kernels.sum_of_squares([tensors[1]])) == 0.0


@pytest.mark.parametrize("total", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_accumulated_gradients_equal_their_twin(total, dtype):
    """To the bit: a number is added to one, and both are exact in fp32."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    strided = drawn(6, 4, 5, dtype=total).transpose(0, 2)
    halves = drawn(2, 50, dtype=total)
    for before, grad in (
        *((drawn(*s, dtype=total), drawn(*s, dtype=dtype)) for s in ((3, 33, 50), (), (0, 4))),
        (strided, strided.to(dtype, copy=True)),  # dense, in another order
        (strided, drawn(5, 4, 6, dtype=dtype)),
        (drawn(9, 8, dtype=total)[:, ::2], drawn(9, 4, dtype=dtype)),
        (drawn(7, dtype=total), drawn(1, dtype=dtype).expand(7)),
        (drawn(4097, dtype=total)[1:], drawn(4097, dtype=dtype)[1:]),
        (halves[0], halves[1]),  # of one memory
    ):
        at_first, version = before.clone(), before._version
        want = at_first.double() + grad.double()
        got = mb_kernels.accumulate_grad(before, grad)
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want.float(), rtol=0, atol=0)
        assert (got is before) == (total is torch.float32)
        assert before._version == version + (got is before)
        assert got is before or torch.equal(before, at_first)


def test_a_total_that_lies_in_one_place_or_over_its_gradient_is_refused():
    with pytest.raises(RuntimeError, match="single memory location"):
        mb_kernels.accumulate_grad(torch.zeros(1).expand(3), torch.ones(3))
    numbers = torch.arange(5.0)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        mb_kernels.accumulate_grad(numbers[1:], numbers[:-1])


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grad", "copy", "nesterov"),
    [
        (torch.float32, None, True),
        (torch.float16, torch.float16, False),
        (torch.bfloat16, torch.bfloat16, True),
    ],
)
def test_muons_passes_equal_their_twins(grad, copy, nesterov, found_inf):
    generator = torch.Generator().manual_seed(3)
    flags = {"found_inf": torch.tensor(found_inf)}
    for shape in ((3, 33, 50), (0, 4), (16, 16)):
        given = torch.randn(shape, generator=generator).to(grad)
        if found_inf:
            given.fill_(torch.nan)
        buffer, weight = (torch.randn(shape, generator=generator) for _ in range(2))
        results = []
        for module in (mb_kernels, reference):
            m, w = buffer.clone(), weight.clone()
            c = None if copy is None else torch.full_like(weight, 7, dtype=copy)
            rates = {"momentum": 0.95, "nesterov": nesterov, "grad_scale": torch.tensor(4.0)}
            direction = module.muon_momentum(given, m, **rates, dtype=torch.float16, **flags)
            assert nesterov or torch.equal(direction, m.half()) or found_inf
            update = direction if not found_inf else torch.full_like(direction, torch.nan)
            module.muon_step(w, update, c, size=0.1, decay=0.01, **flags)
            results.append((direction, m, w, *([] if c is None else [c])))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)
        if found_inf:
            assert torch.equal(results[0][1], buffer)
            assert torch.equal(results[0][2], weight)
            assert copy is None or (results[0][3] == 7).all()


def test_muons_kernels_run_where_their_tensors_are(monkeypatch):
    given, here = [], []

    @contextlib.contextmanager
    def device_of(x):
        given.append(x)
        here.append(x)
        yield
        here.pop()

    def step(x, *tensors, **numbers):
        assert here[0] is x

    monkeypatch.setattr(muon.registration, "device_of", device_of)
    monkeypatch.setattr(muon, "_implementation", lambda *_: step)
    grad, weight, flag = torch.ones(3), torch.ones(3), torch.tensor(0.0)
    mb_kernels.muon_momentum(grad, weight, momentum=0.5, grad_scale=flag, found_inf=flag)
    mb_kernels.muon_step(weight, grad, None, size=0.1, decay=0.0, found_inf=flag)
    assert given[0] is grad
    assert given[1] is weight


def test_gradients_that_lie_negated_in_memory(reachable, monkeypatch):
    """Those of imaginary parts, as autograd hands them to parameters of one number."""
    weight, flag, results = torch.randn(1, requires_grad=True), torch.tensor(0.0), []
    torch.complex(torch.zeros(1), weight).conj().mul(1 + 2j).imag.sum().backward()
    assert weight.grad.is_neg()
    resolve = torch.Tensor.resolve_neg
    monkeypatch.setattr(
        torch.Tensor, "resolve_neg", lambda t: reachable.append(resolve(t)) or reachable[-1]
    )
    for grad in (weight.grad, resolve(weight.grad)):
        w, m, v, buffer = weight.detach().clone(), *torch.zeros(3, 1)
        flags = {"grad_scale": torch.tensor(1.0), "found_inf": flag}
        reachable[:] = [w, m, v]
        mb_kernels.adamw_step([w], [grad], [m], [v], [None], [torch.tensor(0.0)], **HYPER, **flags)
        direction = mb_kernels.muon_momentum(grad, buffer, momentum=0.9, **flags)
        mb_kernels.muon_step(w, grad, None, size=0.1, decay=0.0, found_inf=flag)
        results.append((w, m, v, buffer, direction))
    torch.testing.assert_close(*results)


def test_a_compiled_step_leaves_the_optimizers_kernels_alone(reachable):
    flags = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}

    def train(grad, weight, m, v, step):
        mb_kernels.adamw_step([weight], [grad], [m], [v], [None], [step], **HYPER, **flags)
        direction = mb_kernels.muon_momentum(grad, m, momentum=0.9, **flags, dtype=torch.float32)
        mb_kernels.muon_step(weight, direction, None, size=0.1, decay=0.0, found_inf=step * 0)
        return weight * 2

    results = []
    for run in (train, torch.compile(train, backend="aot_eager")):
        weights, grads, first, second, _, steps = _state([(5, 16)])
        given = [*grads, *weights, *first, *second, *steps]
        reachable[:] = given
        results.append((run(*given), *given))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
